"""A small causal language model in one file: the Llama block, optionally with a mixture of experts.

Lineage: RMSNorm, rotary positions, grouped-query attention and SwiGLU as in Llama; parameter names are Llama's, so that
its weights load as they are. The router follows Mixtral. Shapes: B sequences, S tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from stepscope.errors import StepscopeError
from stepscope.reference.config import ModelConfig

__all__ = ["CausalLM", "CausalLMOutput", "ModelConfig", "causal_lm_loss", "load_balance_loss"]

IGNORE_INDEX = -100
"""Label of a position that does not count in the loss."""


class CausalLMOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        loss: mean cross entropy over the targets that count, a scalar; None without labels.
        aux_loss: load-balance loss of the routers, summed over layers, a scalar; 0 in a dense model.
        logits: prediction of the next token, [B, S, V].
    """

    loss: Tensor | None
    aux_loss: Tensor
    logits: Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in its own type where that is wider, so that a float64 copy of the model stays exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dimension, then scale (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        precise = at_least_float32(x)
        normed = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotate pairs of dimensions (i, i + d/2) by an angle that grows with the position (Su et al., 2021)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(max_positions).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, [B, heads, S, head_dim]."""
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        return x * self.cos[:length].to(x.dtype) + rotated * self.sin[:length].to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention whose key and value heads are shared by groups of query heads (Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        width, kv_width = config.hidden_size, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        queries, keys, values = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        group = queries.shape[1] // keys.shape[1]
        mixed = F.scaled_dot_product_attention(
            rotary(queries),
            rotary(keys).repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads · head_dim] -> [B, heads, S, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) · up(x)) (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.feed_forward_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


def load_balance_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Router loss that is smallest where tokens spread evenly (Fedus et al., Switch Transformers, eq. 4).

    N · Σ_e f_e · p_e, with f_e the share of tokens sent to expert e and p_e the mean probability given to it. With k
    experts a token the f_e add up to k, as in Mixtral, and an even spread gives k. A product of two batch means: it is
    not linear in the tokens, so K micro-batches do not add up to one large batch.

    Args:
        probabilities: softmax over the experts, [tokens, experts].
        chosen: indices of the experts taken, [tokens, k].
    """
    num_experts = probabilities.shape[-1]
    share = F.one_hot(chosen, num_experts).sum(dim=1).to(probabilities.dtype).mean(dim=0)
    return num_experts * torch.sum(share * probabilities.mean(dim=0))


class MixtureOfExperts(nn.Module):
    """Each token goes to its k most probable experts; their outputs are weighted by the renormalised probabilities."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.experts_per_token = config.num_experts_per_tok
        self.aux_loss_coef = config.router_aux_loss_coef
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> the mixed outputs, [B, S, D], and this layer's load-balance loss."""
        tokens = x.flatten(0, 1)
        probabilities = at_least_float32(self.gate(tokens)).softmax(dim=-1)
        weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            weighted = expert(tokens[token]) * weights[token, slot, None]
            mixed = mixed.index_add(0, token, weighted.to(mixed.dtype))
        return mixed.view_as(x), self.aux_loss_coef * load_balance_loss(probabilities, chosen)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config) if config.use_moe else SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor | None]:
        """[B, S, D] -> the same shape, and the router's loss where there is a router."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rotary))
        output = self.mlp(self.post_attention_layernorm(x))
        mixed, aux_loss = output if isinstance(output, tuple) else (output, None)
        return x + self.dropout(mixed), aux_loss


class CausalLM(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.rope_theta)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(_initialise)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        """Predict the next token at every position.

        Args:
            input_ids: token ids, [B, S].
            labels: the same ids with -100 where a position does not count, [B, S]; shifted here, not by the caller.

        Raises:
            StepscopeError: a sequence longer than the positions the model was built for.
        """
        if input_ids.shape[-1] > self.config.max_position_embeddings:
            raise StepscopeError(
                f"a sequence of {input_ids.shape[-1]} tokens is longer than the model's "
                f"{self.config.max_position_embeddings} positions",
                hint="raise --max-length",
            )
        x = self.embed_tokens(input_ids)
        aux_loss = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for layer in self.layers:
            x, layer_aux_loss = layer(x, self.rotary)
            aux_loss = aux_loss if layer_aux_loss is None else aux_loss + layer_aux_loss
        logits = self.lm_head(self.norm(x))
        return CausalLMOutput(None if labels is None else causal_lm_loss(logits, labels), aux_loss, logits)


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of each position's prediction against the next position's label.

    Args:
        logits: [B, S, V]; the last position predicts nothing that is known and is dropped.
        labels: [B, S]; the first one is predicted by nothing and is dropped; -100 does not count.
    """
    predictions = at_least_float32(logits[:, :-1]).flatten(0, 1)
    return F.cross_entropy(predictions, labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
