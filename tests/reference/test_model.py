import copy

import pytest
import torch
from torch.nn import functional as F

from stepscope.errors import StepscopeError
from stepscope.reference.config import ModelConfig
from stepscope.reference.model import CausalLM, MixtureOfExperts, causal_lm_loss, load_balance_loss

SIZES = [
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3},
    {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 1},
]


def tokens(vocab_size, shape, seed=0):
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s['num_attention_heads']}-heads")
def test_same_weights_as_llama_give_the_same_logits_loss_and_gradients(size):
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(vocab_size=61, max_position_embeddings=32, **size)
    torch.manual_seed(0)
    ours = CausalLM(config)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=config.hidden_size,
            intermediate_size=config.feed_forward_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=32,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=True,
        )
    )
    llama.model.load_state_dict({k: v for k, v in ours.state_dict().items() if k != "lm_head.weight"})
    input_ids = tokens(61, (3, 17))
    labels = input_ids.masked_fill(tokens(5, (3, 17), seed=1) == 0, -100)
    got = ours(input_ids, labels=labels)
    expected = llama(input_ids=input_ids, labels=labels)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
    got.loss.backward()
    expected.loss.backward()
    theirs = dict(llama.model.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad.norm() > 0
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


def test_embeddings_are_tied_and_stay_tied_in_a_copy():
    model = copy.deepcopy(CausalLM(ModelConfig(vocab_size=7, hidden_size=8, num_attention_heads=2)))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_a_token_sees_only_what_comes_before_it():
    model = CausalLM(ModelConfig(vocab_size=13, hidden_size=16, num_attention_heads=2)).eval()
    first = tokens(13, (1, 9))
    second = first.clone()
    second[0, 5:] = (second[0, 5:] + 1) % 13
    before, after = model(first).logits, model(second).logits
    torch.testing.assert_close(before[0, :5], after[0, :5], rtol=0, atol=1e-6)
    assert (before[0, 5:] - after[0, 5:]).abs().max() > 1e-3


def test_loss_is_the_mean_over_shifted_targets_that_count():
    """Against a loop over positions in float64: position t predicts label t + 1; -100 is left out of the mean."""
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([[1, 2, -100, 3, 4], [0, -100, 6, 5, -100]])
    terms = [
        -torch.log(logits[b, t].exp()[labels[b, t + 1]] / logits[b, t].exp().sum()).item()
        for b in range(2)
        for t in range(4)
        if labels[b, t + 1] != -100
    ]
    assert len(terms) == 5
    assert causal_lm_loss(logits, labels).item() == pytest.approx(sum(terms) / 5, rel=1e-12)


def test_dense_model_has_an_aux_loss_of_zero_and_no_loss_without_labels():
    output = CausalLM(ModelConfig(vocab_size=7, hidden_size=8, num_attention_heads=2))(tokens(7, (2, 4)))
    assert output.loss is None
    assert output.aux_loss.shape == ()
    assert output.aux_loss.item() == 0
    assert output.logits.shape == (2, 4, 7)


def moe_config(**changes):
    options = {"vocab_size": 7, "hidden_size": 8, "num_attention_heads": 2, "use_moe": True, "num_experts": 5}
    return ModelConfig(**{**options, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.3, **changes})


@pytest.mark.parametrize("per_token", [1, 2, 5])
def test_mixture_is_the_weighted_sum_of_each_tokens_experts(per_token):
    """Against a loop over single tokens in float64 that knows nothing of gathering and scattering."""
    torch.manual_seed(0)
    moe = MixtureOfExperts(moe_config(num_experts_per_tok=per_token)).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    mixed, aux_loss = moe(x)
    chosen_count, probability_sum = torch.zeros(5).double(), torch.zeros(5).double()
    for b in range(2):
        for s in range(6):
            scores = torch.softmax(moe.gate.weight @ x[b, s], 0)
            best = sorted(range(5), key=lambda e, scores=scores: -scores[e].item())[:per_token]
            share = sum(scores[e] for e in best)
            expected = sum(scores[e] / share * moe.experts[e](x[b, s]) for e in best)
            torch.testing.assert_close(mixed[b, s], expected, rtol=1e-12, atol=1e-14)
            for e in best:
                chosen_count[e] += 1
            probability_sum += scores
    expected_aux = 0.3 * 5 * sum(chosen_count[e] / 12 * probability_sum[e] / 12 for e in range(5))
    torch.testing.assert_close(aux_loss, expected_aux, rtol=1e-12, atol=0)


def test_load_balance_loss_by_hand():
    """Two tokens, two experts, both sent to expert 0: f = (1, 0), p = (0.7, 0.3), so 2 · 0.7; evenly spread it is 1."""
    one_sided = load_balance_loss(torch.tensor([[0.6, 0.4], [0.8, 0.2]]), torch.tensor([[0], [0]]))
    assert one_sided.item() == pytest.approx(1.4)
    even = load_balance_loss(torch.tensor([[0.6, 0.4], [0.4, 0.6]]), torch.tensor([[0], [1]]))
    assert even.item() == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore")
def test_load_balance_loss_is_mixtrals():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    scores = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    probabilities = scores.softmax(-1)
    ours = load_balance_loss(probabilities, probabilities.topk(2).indices)
    theirs = mixtral.load_balancing_loss_func((scores,), num_experts=5, top_k=2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_aux_loss_of_the_model_sums_its_layers_and_trains_the_router():
    torch.manual_seed(0)
    model = CausalLM(moe_config(num_hidden_layers=3))
    output = model(tokens(7, (2, 6)))
    # With small initial weights the routers are all but even: each layer gives about coef · k = 0.3 · 2.
    assert output.aux_loss.item() == pytest.approx(3 * 0.6, rel=0.02)
    output.aux_loss.backward()
    assert all(layer.mlp.gate.weight.grad.norm() > 0 for layer in model.layers)


def test_float64_copy_computes_in_float64():
    torch.manual_seed(0)
    model = CausalLM(moe_config()).double()
    output = model(tokens(7, (2, 6)), labels=tokens(7, (2, 6)))
    assert {output.loss.dtype, output.aux_loss.dtype, output.logits.dtype} == {torch.float64}
    # A float32 detour anywhere in the norm would show here as 1e-7.
    x = torch.randn(2, 8, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(model.norm(x), expected, rtol=1e-14, atol=0)


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(vocab_size=7, hidden_size=8, num_attention_heads=2, dropout=0.5))
    ids = tokens(7, (2, 6))
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_too_long_a_sequence_is_refused():
    model = CausalLM(ModelConfig(vocab_size=7, hidden_size=8, num_attention_heads=2, max_position_embeddings=4))
    with pytest.raises(StepscopeError, match="5 tokens is longer than the model's 4 positions"):
        model(tokens(7, (1, 5)))


def test_rotary_scores_depend_on_distance_alone():
    from stepscope.reference.model import RotaryEmbedding

    rotary = RotaryEmbedding(8, 32, 10000.0).double()
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    queries = rotary(query.expand(1, 1, 32, 8))[0, 0]
    keys = rotary(key.expand(1, 1, 32, 8))[0, 0]
    scores = queries @ keys.T
    assert scores[9, 4].item() == pytest.approx(scores[20, 15].item(), rel=1e-5)
    assert abs(scores[9, 4] - scores[9, 5]) > 1e-3
    assert F.cosine_similarity(queries[0], query, dim=0).item() == pytest.approx(1.0)
