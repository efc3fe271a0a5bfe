"""Layers of experts with random weights, in every layout, for tests on any framework."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import moe_oracle
import numpy as np
from producers import Producer


@dataclass(frozen=True)
class Case:
    """One layer. Weights are stored as they are passed, or turned round where `transposed`."""

    tokens: int = 37
    hidden: int = 40
    inner: int = 24
    experts: int = 6
    top_k: int = 2
    gate: str = "gate_up"
    activation: str = "silu"
    transposed: bool = False
    down_transposed: bool | None = None  # as `transposed`, unless it is said
    bias: str | None = None  # dtype of biases
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    weight_on_input: bool = False
    seed: int = 0

    def __str__(self) -> str:
        plain = Case()
        changed = (
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        )
        return ",".join(changed) or "plain"

    @property
    def options(self) -> dict[str, Any]:
        """The options of moe_forward that are not tensors."""
        return {
            "gate": self.gate, "activation": self.activation, "alpha": self.alpha,
            "limit": self.limit, "up_offset": self.up_offset,
            "weight_on_input": self.weight_on_input,
        }  # fmt: skip

    @property
    def turns_down(self) -> bool:
        return self.transposed if self.down_transposed is None else self.down_transposed

    @property
    def rows(self) -> int:
        """The rows of an expert's first matrix."""
        return self.inner if self.gate in ("separate", "none") else 2 * self.inner


# As models have them: what Qwen and Mixtral do, gpt-oss, Llama 4, Nemotron-H, FlashInfer's order.
CASES = (
    Case(),
    Case(gate="up_gate", bias="fp32"),
    Case(gate="interleaved", transposed=True, bias="x", alpha=1.702, limit=1.0, up_offset=1.0),
    Case(gate="separate", activation="gelu", bias="fp32", transposed=True),
    Case(gate="none", activation="relu2", bias="x"),
    Case(gate="gate_up", activation="gelu_tanh", transposed=True, weight_on_input=True, top_k=1),
    Case(gate="interleaved", activation="relu", weight_on_input=True, limit=0.5),
    Case(gate="gate_up", transposed=True, down_transposed=False),
    Case(gate="up_gate", down_transposed=True, bias="x"),
)


def random_ids(rng: np.random.Generator, case: Case) -> np.ndarray:
    """[T, K] int32, distinct in each token."""
    order = rng.random((case.tokens, case.experts)).argsort(1)
    return np.ascontiguousarray(order[:, : case.top_k].astype(np.int32))


def routing_of(ids: np.ndarray, weights: np.ndarray, experts: int) -> moe_oracle.Routing:
    return moe_oracle.Routing(
        ids, weights.astype(np.float32), *moe_oracle.sort_pairs(ids, experts), None
    )


def arrays_of(case: Case) -> dict[str, np.ndarray]:
    """x and weights in fp32, by moe_forward's names, and `routing`."""
    rng = np.random.default_rng(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    def matrix(rows: int, columns: int, turned: bool = case.transposed) -> np.ndarray:
        if turned:
            return normal(case.experts, columns, rows, scale=columns**-0.5).swapaxes(1, 2)
        return normal(case.experts, rows, columns, scale=columns**-0.5)

    made: dict[str, Any] = {
        "x": normal(case.tokens, case.hidden),
        "w_gate_up": matrix(case.rows, case.hidden),
        "w_down": matrix(case.hidden, case.inner, case.turns_down),
    }
    if case.gate == "separate":
        made["w_up"] = matrix(case.inner, case.hidden)
    if case.bias is not None:
        made["b_gate_up"] = normal(case.experts, case.rows)
        made["b_down"] = normal(case.experts, case.hidden)
        if case.gate == "separate":
            made["b_up"] = normal(case.experts, case.inner)
    made["routing"] = routing_of(
        random_ids(rng, case), rng.random((case.tokens, case.top_k)), case.experts
    )
    return made


def make(case: Case, producer: Producer, dtype: str) -> dict[str, Any]:
    """Arguments of moe_forward as tensors of a framework."""
    import flashmoe_science as fm

    made: dict[str, Any] = {}
    for name, values in arrays_of(case).items():
        if name == "routing":
            parts = (None if part is None else producer.as_is(part) for part in values)
            made[name] = fm.MoeRouting(*parts)
        elif name.startswith("b_"):
            made[name] = producer.make(values, dtype if case.bias == "x" else "fp32")
        else:
            made[name] = producer.make(values, dtype)
    return made


def rounded(case: Case, dtype: str) -> dict[str, Any]:
    """The same values as NumPy has them in that dtype, for the reference."""
    return make(case, Producer(), dtype)
