import pytest
import torch
from torch import nn

from stepscope.errors import StepscopeError
from stepscope.reference.config import ModelConfig
from stepscope.reference.model import CausalLM
from stepscope.reference.optim import make_adamw, parameter_groups


def test_matrices_decay_and_vectors_do_not():
    model = CausalLM(ModelConfig(vocab_size=7, hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    decay, keep = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
    assert sorted(names[id(p)] for p in keep["params"]) == [
        "layers.0.input_layernorm.weight",
        "layers.0.post_attention_layernorm.weight",
        "norm.weight",
    ]
    assert "embed_tokens.weight" in {names[id(p)] for p in decay["params"]}
    assert len(decay["params"]) + len(keep["params"]) == len(names)


def test_frozen_parameters_are_left_out_and_empty_groups_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    (group,) = parameter_groups(model, 0.1)
    assert [p is model[1].weight for p in group["params"]] == [True]


def test_decay_moves_an_idle_matrix_by_lr_times_decay_and_leaves_a_vector():
    """With a zero gradient AdamW's step is w <- w - lr·wd·w: 2 - 0.1·0.5·2 = 1.9."""
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    optimizer = make_adamw(model, lr=0.1, weight_decay=0.5)
    model.weight.grad, model.bias.grad = torch.zeros_like(model.weight), torch.zeros_like(model.bias)
    optimizer.step()
    assert model.weight.item() == pytest.approx(1.9)
    assert model.bias.item() == 2.0


def test_first_step_is_the_sign_of_the_gradient_times_the_rate():
    """Bias-corrected moments of a single gradient g are g and g²: the step is lr·g/(|g| + 1e-8), whatever the betas."""
    model = nn.Linear(1, 1, bias=False).double()
    before = model.weight.item()
    optimizer = make_adamw(model, lr=0.1, weight_decay=0.0, betas=(0.5, 0.7))
    model.weight.grad = torch.full_like(model.weight, -3.0)
    optimizer.step()
    assert model.weight.item() - before == pytest.approx(0.1, rel=1e-6)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.7)


def test_nothing_to_train_is_an_error():
    with pytest.raises(StepscopeError, match="no parameter that requires a gradient"):
        make_adamw(nn.ReLU(), lr=0.1)
