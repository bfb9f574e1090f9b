"""The options of ``stepscope trace`` as the command line sees them."""

import pytest
import typer
from typer.testing import CliRunner

from stepscope.commands import trace
from stepscope.errors import StepscopeError
from stepscope.reference.config import TraceConfig


@pytest.fixture
def parse(monkeypatch):
    """Parse arguments into the TraceConfig that the command's body receives."""
    seen = []
    monkeypatch.setattr(trace, "_run", lambda config: seen.append(config) or 0)
    app = typer.Typer()
    app.callback()(lambda: None)
    trace.register(app)

    def run(*args):
        result = CliRunner().invoke(app, ["trace", *args], catch_exceptions=True)
        if isinstance(result.exception, StepscopeError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return seen[-1]

    run.app = app
    return run


def test_no_options_give_the_defaults(parse):
    assert parse() == TraceConfig()


def test_every_option_reaches_its_field(parse):
    options = (
        "--batch-size 3 --max-length 32 --hidden-size 48 --layers 1 --heads 6 --kv-heads 2 --moe --experts 3",
        "--learning-rate 0.01 --schedule warmup-cosine --warmup-steps 2 --min-lr-ratio 0.2",
        "--accumulation-steps 2 --grad-clip 0.5 --dtype float16 --device cpu --epochs 2 --seed 7",
        "--weight-decay 0.2 --beta1 0.8 --beta2 0.9 --dropout 0.1 --no-fused --init-scale 256",
        "--tail minimind --data a.txt --save-every 3 --resume b.pt --out c --force --every 2",
        "--experts-per-token 1 --aux-loss-coef 0.5 --fail-on never --quiet",
    )
    config = parse(*" ".join(options).split())
    assert config == TraceConfig(
        batch_size=3, max_length=32, hidden_size=48, layers=1, heads=6, kv_heads=2, moe=True, experts=3,
        learning_rate=0.01, schedule="warmup-cosine", warmup_steps=2, min_lr_ratio=0.2,
        accumulation_steps=2, grad_clip=0.5, dtype="float16", device="cpu", epochs=2, seed=7,
        weight_decay=0.2, beta1=0.8, beta2=0.9, dropout=0.1, fused=False, init_scale=256.0,
        tail="minimind", data="a.txt", save_every=3, resume="b.pt", out="c", force=True, every=2,
        experts_per_token=1, aux_loss_coef=0.5, fail_on="never", quiet=True,
    )  # fmt: skip


def test_names_of_the_lesson_work_too(parse):
    config = parse("--batch_size", "2", "--max_length", "48", "--hidden_size", "64", "--num_hidden_layers", "3")
    assert config == TraceConfig(batch_size=2, max_length=48, hidden_size=64, layers=3)
    assert parse("--lr", "0.5", "--factory", "my_file.py:make_it").factory == "my_file.py:make_it"


def test_bad_value_is_one_line(parse):
    with pytest.raises(StepscopeError, match="--heads 5 does not divide the hidden size, 64"):
        parse("--heads", "5")


def test_help_groups_the_options(parse):
    text = CliRunner().invoke(parse.app, ["trace", "--help"], env={"COLUMNS": "200"}).output
    for panel in ("Model", "Data", "Optimizer and schedule", "Precision", "Run", "Output"):
        assert f"─ {panel} ─" in text
