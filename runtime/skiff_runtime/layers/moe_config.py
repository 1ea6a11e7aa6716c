"""Mixture of experts of a model, as plain data; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoeModules:
    """Names of the checkpoint's modules of a sparse block: ``block`` within a decoder layer, the others within it.

    ``experts`` holds one module for each expert, named by its number, and each of these the three linear layers.
    """

    block: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Sparse blocks of a model: all layers but ``dense_layers`` have one in place of an MLP.

    Each token takes the ``top_k`` of ``num_experts`` experts, whose MLPs have ``intermediate_size`` columns.
    ``renormalize`` divides their weights by the sum of these.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    dense_layers: tuple[int, ...] = ()
    modules: MoeModules = MoeModules()

    def expected_experts(self, tokens: int) -> float:
        """Return the expected number of experts that ``tokens`` tokens choose: E * (1 - (1 - k / E) ** T).

        Each token is assumed to choose k of E experts at random, independently of the others.
        """
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)
