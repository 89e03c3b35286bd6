"""Any nn.Module as a function of its parameters, for one model or for many at once."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedkper.errors import InputError
from fedkper.tree import Tree

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class Out(NamedTuple):
    features: Tensor  # [L, B, D], what goes into the head
    logits: Tensor  # [L, B, C]


class Lanes:
    """A module without parameters of its own: `model(theta, x)`, theta a tree, both with a lane axis.

    The head is the last linear layer, or the module named `head`, or else all parameters whose names start
    with `head`; the body is the rest. Together they hold every parameter and buffer exactly once. Features
    are what the head receives. Parameters frozen by requires_grad_(False) are shared but not trained.

    Models with BatchNorm: its running statistics are buffers of the tree, averaged like weights; a batch
    of a single sample is normalised with the running statistics, since it has no statistics of its own.

    Precision bf16: the arithmetic of the layers in bfloat16, weights, losses and sums in float32.
    """

    def __init__(self, module: nn.Module, head: str = "", precision: str = "float32") -> None:
        self.module = module
        self.bf16 = precision == "bf16"
        linear = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
        exact = head.rstrip(".") if head else linear[-1] if linear else ""
        self._head = f"{exact}." if exact in dict(module.named_modules()) and exact else head
        self.misses_logits = False
        """set by who has seen that the head found here does not give the logits"""
        self.buffers = frozenset(n for n, _ in module.named_buffers())
        self.frozen = frozenset(n for n, p in module.named_parameters() if not p.requires_grad)
        self.names = frozenset(module.state_dict())
        self.batch_norm = tuple(m for m in module.modules() if isinstance(m, _BATCH_NORM))
        self.random = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in module.modules())
        self._initial: Tree = {}
        self._seen: list[Tensor] = []
        for name, part in module.named_modules():
            if name and self.in_head(name) and not list(part.children()):
                part.register_forward_pre_hook(self._note)

    def _note(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._seen.append(args[0])

    def in_head(self, name: str) -> bool:
        return bool(self._head) and f"{name}.".startswith(self._head)

    def init(self) -> Tree:
        """The initial parameters and buffers: one lane, the module's; or those given to `starting`."""
        return self._initial or {k: v.detach().clone()[None] for k, v in self.module.state_dict().items()}

    def starting(self, initial: Tree) -> Lanes:
        """The same model for lanes of runs that began with other parameters: `initial` [L, ...]."""
        twin = copy.copy(self)
        twin._initial = initial
        return twin

    def split(self, tree: Tree) -> tuple[Tree, Tree]:
        """Body and head. Raises InputError with the parameters' names if one of them would be empty."""
        body = {k: v for k, v in tree.items() if not self.in_head(k)}
        head = {k: v for k, v in tree.items() if k not in body}
        found, names = f"'{self._head.rstrip('.') or 'a last linear layer'}'", ", ".join(tree)
        where = "inside" if body else "outside"
        fault = f"no parameter is {where} {found}" if not body or not head else ""
        if self.misses_logits:
            fault = f"the last linear layer {found} does not give the logits"
        if fault:
            raise InputError(
                f"model {type(self.module).__name__}: head and body cannot be told apart: {fault}. Name with "
                f"--head a prefix of the head's parameters, which are among: {names}"
            )
        return body, head

    def trainable(self, name: str, leaf: Tensor) -> bool:
        """Whether a leaf, in any sub-tree, is a parameter that is trained: no buffer, not frozen."""
        name = name.rpartition("/")[2]
        return leaf.is_floating_point() and name not in self.buffers and name not in self.frozen

    def parameters(self, tree: Tree) -> Tree:
        """The leaves that are trained."""
        return {k: v for k, v in tree.items() if self.trainable(k, v)}

    def __call__(self, theta: Tree, x: Tensor, train: bool = True) -> Out:
        """Features and logits of x [L, B, ...]. While training, BatchNorm updates its buffers in theta."""
        if self.module.training != train:
            self.module.train(train)
        if self.batch_norm and train:
            for part in self.batch_norm:
                part.train(x.shape[1] > 1)
        if self.bf16:
            with torch.autocast(x.device.type, torch.bfloat16):
                out = self._forward(theta, x)
            return Out(out.features.float(), out.logits.float())
        return self._forward(theta, x)

    def _forward(self, theta: Tree, x: Tensor) -> Out:
        if len(x) > 1:
            return Out(*vmap(self._one, randomness="different")(theta, x))
        # squeeze is a view whose gradient is a view; indexing would allocate a zero tensor a leaf a step.
        features, logits = self._one({k: v.squeeze(0) for k, v in theta.items()}, x.squeeze(0))
        return Out(features[None], logits[None])

    def _one(self, theta: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        self._seen.clear()
        logits = functional_call(self.module, theta, (x,))
        features = (self._seen[0] if self._seen else logits).flatten(1)
        self._seen.clear()
        return features, logits
