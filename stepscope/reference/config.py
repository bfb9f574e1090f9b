"""The options of the reference run: names, defaults, help and every check of a value, in one place.

`TraceConfig` is the home of each option; the command line is derived from its fields. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from stepscope.errors import FAIL_ON, StepscopeError, require_one_of
from stepscope.reference.schedules import SCHEDULES

SCHEDULE_NAMES = tuple(SCHEDULES)
DTYPES = ("float32", "bfloat16", "float16")
TAILS = ("right", "minimind")
DEFAULT_OPTIMIZER_STEPS = 6
"""Length of a run that names neither steps nor epochs: a few windows, enough to look at."""


def _option(default: Any, *flags: str, panel: str, help: str, metavar: str = "") -> Any:  # noqa: A002
    """A field that is also an option of the command line."""
    return field(default=default, metadata={"flags": flags, "panel": panel, "help": help, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the reference language model, with the names that Llama's configuration uses.

    Attributes:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads in a layer.
        num_key_value_heads: key and value heads; None for as many as query heads.
        intermediate_size: width of the feed-forward; None for 8/3 of the hidden size, rounded up to a multiple of 64.
        max_position_embeddings: longest sequence.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square in RMSNorm.
        dropout: probability, in attention and on both residual branches.
        use_moe: a mixture of experts instead of one feed-forward.
        num_experts: experts in a layer.
        num_experts_per_tok: experts that each token is sent to.
        router_aux_loss_coef: weight of the load-balance loss.

    Raises:
        StepscopeError: sizes that do not fit together.
    """

    vocab_size: int
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    dropout: float = 0.0
    use_moe: bool = False
    num_experts: int = 4
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.01

    def __post_init__(self) -> None:
        self._require_positive()
        _require_divides("heads", self.num_attention_heads, "hidden size", self.hidden_size)
        _require_divides("kv-heads", self.kv_heads, "number of heads", self.num_attention_heads)
        if self.head_dim % 2:
            raise StepscopeError(
                f"a head has {self.head_dim} dimensions (hidden size {self.hidden_size} / {self.num_attention_heads} "
                "heads); rotary positions need an even number",
                hint="change --hidden-size or --heads",
            )
        require_in("dropout", self.dropout, 0, 1, below=True)
        if self.use_moe and self.num_experts_per_tok > self.num_experts:
            raise StepscopeError(
                f"a token cannot go to {self.num_experts_per_tok} of {self.num_experts} experts",
                hint="lower --experts-per-token or raise --experts",
            )

    def _require_positive(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in ("dropout", "use_moe", "router_aux_loss_coef") and value is not None and not value > 0:
                raise StepscopeError(f"{_option_of(item.name)} is {value}; it must be above 0")

    @property
    def kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def feed_forward_size(self) -> int:
        """Width of the feed-forward, resolved."""
        return self.intermediate_size or 64 * math.ceil(self.hidden_size * 8 / 3 / 64)


_MODEL = "Model"
_DATA = "Data"
_OPTIMIZER = "Optimizer and schedule"
_PRECISION = "Precision"
_RUN = "Run"
_OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Every option of a reference run. Each field's help is in its metadata; units are named there.

    Raises:
        StepscopeError: a value out of range, or options that exclude each other; the message names the option.
    """

    hidden_size: int = _option(64, panel=_MODEL, help="Width of the residual stream.")
    layers: int = _option(2, "--layers", "--num-hidden-layers", panel=_MODEL, help="Number of blocks.")
    heads: int = _option(4, panel=_MODEL, help="Query heads in a layer.")
    kv_heads: int | None = _option(None, panel=_MODEL, help="Key and value heads (default: as many as heads).")
    moe: bool = _option(False, panel=_MODEL, help="Mixture of experts instead of one feed-forward.")
    experts: int = _option(4, panel=_MODEL, help="Experts in a layer.")
    experts_per_token: int = _option(2, panel=_MODEL, help="Experts that each token is sent to.")
    aux_loss_coef: float = _option(0.01, panel=_MODEL, help="Weight of the router's load-balance loss.")
    dropout: float = _option(0.0, panel=_MODEL, help="Dropout probability.")
    factory: str | None = _option(
        None,
        panel=_MODEL,
        metavar="TARGET",
        help="Own parts instead: a function (file.py:make or pkg.mod:make) that returns model and data, and if wanted "
        "optimizer, loss_fn and scheduler.",
    )

    data: str | None = _option(
        None,
        panel=_DATA,
        metavar="FILE",
        help="A .txt, .jsonl or .parquet file (default: text that ships with Python).",
    )
    batch_size: int = _option(4, panel=_DATA, help="Sequences in a micro-batch.")
    max_length: int = _option(128, panel=_DATA, help="Tokens in a sequence, begin and end marks included.")

    learning_rate: float = _option(5e-4, "--learning-rate", "--lr", panel=_OPTIMIZER, help="Peak learning rate.")
    schedule: str = _option(
        "minimind-cosine", panel=_OPTIMIZER, metavar="|".join(SCHEDULE_NAMES), help="How the learning rate moves."
    )
    warmup_steps: int = _option(0, panel=_OPTIMIZER, help="Warm-up, in optimizer steps (warmup-cosine).")
    min_lr_ratio: float = _option(0.1, panel=_OPTIMIZER, help="Floor as a share of the peak (warmup-cosine).")
    accumulation_steps: int = _option(4, panel=_OPTIMIZER, help="Micro-steps in a window: one optimizer step.")
    tail: str = _option(
        "right",
        panel=_OPTIMIZER,
        metavar="|".join(TAILS),
        help="Divisor of a last, shorter window: its own size, or the full size as MiniMind does.",
    )
    grad_clip: float = _option(1.0, panel=_OPTIMIZER, help="Largest gradient norm; 0 switches clipping off.")
    weight_decay: float = _option(0.1, panel=_OPTIMIZER, help="AdamW's decoupled decay, on matrices only.")
    beta1: float = _option(0.9, panel=_OPTIMIZER, help="AdamW: decay of the first moment.")
    beta2: float = _option(0.95, panel=_OPTIMIZER, help="AdamW: decay of the second moment.")
    fused: bool | None = _option(
        None, "--fused/--no-fused", panel=_OPTIMIZER, help="One fused optimizer kernel (default: torch's choice)."
    )

    dtype: str = _option(
        "float32", panel=_PRECISION, metavar="|".join(DTYPES), help="Autocast type; float16 also scales the loss."
    )
    device: str = _option("auto", panel=_PRECISION, help="auto, cpu, cuda, or any torch device.")
    init_scale: float = _option(65536.0, panel=_PRECISION, help="First loss scale (float16).")

    steps: int | None = _option(
        None, panel=_RUN, help=f"Length in optimizer steps, over endless data (default: {DEFAULT_OPTIMIZER_STEPS})."
    )
    epochs: int | None = _option(None, panel=_RUN, help="Length in passes over the data.")
    seed: int = _option(42, panel=_RUN, help="Of the weights, the order of the data and dropout.")
    save_every: int = _option(0, panel=_RUN, metavar="N", help="Checkpoint every N optimizer steps and at the end.")
    resume: str | None = _option(None, panel=_RUN, metavar="CHECKPOINT", help="Continue from a checkpoint.")

    out: str = _option("reports/trace", panel=_OUTPUT, metavar="DIR", help="Where the trace and checkpoints go.")
    force: bool = _option(False, "--force", panel=_OUTPUT, help="Overwrite what is there.")
    every: int = _option(1, panel=_OUTPUT, metavar="N", help="Parameter-level rows every N optimizer steps.")
    fail_on: str = _option("error", panel=_OUTPUT, metavar="|".join(FAIL_ON), help="Lowest severity that exits with 1.")
    quiet: bool = _option(False, "--quiet", "-q", panel=_OUTPUT, help="Print findings only.")

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation_steps", "every"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "save_every"):
            require_at_least(name, getattr(self, name), 0)
        for name in ("steps", "epochs"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 1)
        require_at_least("max_length", self.max_length, 4)
        self._check_numbers()
        self._check_choices()
        if self.factory is None:
            self.model_config(vocab_size=1)

    def _check_numbers(self) -> None:
        for name in ("learning_rate", "init_scale"):
            require_in(name, getattr(self, name), 0, math.inf, above=True, below=True)
        for name in ("weight_decay", "aux_loss_coef"):
            require_in(name, getattr(self, name), 0, math.inf, below=True)
        for name in ("beta1", "beta2"):
            require_in(name, getattr(self, name), 0, 1, below=True)
        require_in("seed", self.seed, 0, 2**32 - 1)  # NumPy takes no more
        require_in("grad_clip", self.grad_clip, 0, math.inf)
        require_in("min_lr_ratio", self.min_lr_ratio, 0, 1)

    def _check_choices(self) -> None:
        require_one_of("--schedule", self.schedule, SCHEDULE_NAMES)
        require_one_of("--dtype", self.dtype, DTYPES)
        require_one_of("--tail", self.tail, TAILS)
        require_one_of("--fail-on", self.fail_on, FAIL_ON)
        if self.steps is not None and self.epochs is not None:
            raise StepscopeError(f"--steps {self.steps} and --epochs {self.epochs} both give a length", hint="keep one")
        if self.factory is not None and self.data is not None:
            raise StepscopeError("--factory brings its own data, and --data was given too", hint="keep one")

    @property
    def optimizer_steps(self) -> int | None:
        """Length in optimizer steps; None where the run is measured in epochs."""
        return None if self.epochs is not None else self.steps or DEFAULT_OPTIMIZER_STEPS

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The reference model that these options describe."""
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.max_length,
            dropout=self.dropout,
            use_moe=self.moe,
            num_experts=self.experts,
            num_experts_per_tok=self.experts_per_token,
            router_aux_loss_coef=self.aux_loss_coef,
        )


_OPTION_OF_MODEL_FIELD = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "hidden_size": "hidden_size",
}


def _option_of(model_field: str) -> str:
    return flag(_OPTION_OF_MODEL_FIELD[model_field]) if model_field in _OPTION_OF_MODEL_FIELD else model_field


def flag(name: str) -> str:
    """The option of a field: ``batch_size`` -> ``--batch-size``."""
    return "--" + name.replace("_", "-")


def require_at_least(name: str, value: int, lowest: int) -> None:
    """Raise a StepscopeError that names the option when `value` is below `lowest`."""
    if value < lowest:
        raise StepscopeError(f"{flag(name)} is {value}; it must be at least {lowest}")


def require_in(name: str, value: float, low: float, high: float, *, above: bool = False, below: bool = False) -> None:
    """Raise a StepscopeError unless low <= value <= high; `above` and `below` make an end exclusive. NaN never fits."""
    if (low < value if above else low <= value) and (value < high if below else value <= high):
        return
    left, right = "(" if above else "[", ")" if below else "]"
    raise StepscopeError(f"{flag(name)} is {value:g}; it must be in {left}{low:g}, {high:g}{right}")


def _require_divides(part: str, parts: int, whole: str, size: int) -> None:
    if size % parts:
        raise StepscopeError(f"--{part} {parts} does not divide the {whole}, {size}", hint=f"change --{part}")
