import math
import subprocess
import sys

import pytest

from stepscope.errors import StepscopeError
from stepscope.reference.config import DEFAULT_OPTIMIZER_STEPS, ModelConfig, TraceConfig

BAD_OPTIONS = [
    ({"batch_size": 0}, "--batch-size is 0; it must be at least 1"),
    ({"accumulation_steps": -1}, "--accumulation-steps is -1"),
    ({"max_length": 3}, "--max-length is 3; it must be at least 4"),
    ({"steps": 0}, "--steps is 0"),
    ({"epochs": 0}, "--epochs is 0"),
    ({"steps": 1, "epochs": 1}, "--steps 1 and --epochs 1 both give a length"),
    ({"every": 0}, "--every is 0"),
    ({"save_every": -1}, "--save-every is -1"),
    ({"warmup_steps": -1}, "--warmup-steps is -1"),
    ({"seed": -1}, "--seed is -1"),
    ({"learning_rate": 0.0}, r"--learning-rate is 0; it must be in \(0, inf\)"),
    ({"learning_rate": math.nan}, "--learning-rate is nan"),
    ({"learning_rate": math.inf}, "--learning-rate is inf"),
    ({"grad_clip": -1.0}, "--grad-clip is -1"),
    ({"grad_clip": math.nan}, "--grad-clip is nan"),
    ({"min_lr_ratio": 1.5}, "--min-lr-ratio is 1.5"),
    ({"weight_decay": -0.1}, "--weight-decay is -0.1"),
    ({"beta1": 1.0}, r"--beta1 is 1; it must be in \[0, 1\)"),
    ({"beta2": -0.1}, "--beta2 is -0.1"),
    ({"init_scale": 0.0}, "--init-scale is 0"),
    ({"dropout": 1.0}, "--dropout is 1"),
    ({"dtype": "float17"}, "--dtype 'float17' is none of .*did you mean float16"),
    ({"schedule": "cosine"}, "--schedule 'cosine' is none of minimind-cosine, warmup-cosine, constant"),
    ({"tail": "wrong"}, "--tail 'wrong' is none of right, minimind"),
    ({"fail_on": "fatal"}, "--fail-on 'fatal' is none of"),
    ({"factory": "a:b", "data": "c.txt"}, "--factory brings its own data"),
    ({"heads": 5}, "--heads 5 does not divide the hidden size, 64"),
    ({"heads": 4, "kv_heads": 3}, "--kv-heads 3 does not divide the number of heads, 4"),
    ({"hidden_size": 12, "heads": 4}, "a head has 3 dimensions .*change --hidden-size or --heads"),
    ({"hidden_size": 0}, "--hidden-size is 0; it must be above 0"),
    ({"layers": 0}, "--layers is 0"),
    ({"heads": -4}, "--heads is -4"),
    ({"kv_heads": 0}, "--kv-heads is 0"),
    ({"moe": True, "experts": 2, "experts_per_token": 3}, "a token cannot go to 3 of 2 experts"),
    ({"moe": True, "experts": 0}, "--experts is 0"),
    ({"aux_loss_coef": -1.0}, "--aux-loss-coef is -1"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda v: str(v)[:40])
def test_bad_option_is_one_line_that_names_it(options, message):
    with pytest.raises(StepscopeError, match=message) as caught:
        TraceConfig(**options)
    assert "\n" not in str(caught.value)


def test_run_is_measured_in_steps_unless_epochs_are_given():
    assert TraceConfig().optimizer_steps == DEFAULT_OPTIMIZER_STEPS
    assert TraceConfig(steps=3).optimizer_steps == 3
    assert TraceConfig(epochs=2).optimizer_steps is None


def test_model_options_of_a_factory_run_are_not_judged():
    assert TraceConfig(factory="a:b", heads=5).factory == "a:b"


@pytest.mark.parametrize(("hidden_size", "expected"), [(64, 192), (72, 192), (512, 1408)])
def test_feed_forward_is_eight_thirds_rounded_up_to_64(hidden_size, expected):
    assert ModelConfig(vocab_size=1, hidden_size=hidden_size).feed_forward_size == expected


def test_options_are_known_without_importing_torch():
    code = (
        "import sys, stepscope.commands.trace; sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'pyarrow')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
