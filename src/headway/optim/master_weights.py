"""Master weights: a 16-bit network whose optimizer steps fp32 copies of the weights.

Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740), section 3.1; multi_precision in MXNet, O2 in
apex. A 16-bit weight loses an update of less than half of its last digit; on the fp32 copy such updates add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from headway.core.errors import UsageError
from headway.optim.half_network import find_narrow, narrow_network

HALF_DTYPES = (torch.bfloat16, torch.float16)


@final
class MasterWeights:
    """Converts a network to 16 bits in place, and gives its optimizer fp32 masters instead of its weights.

    Clipping, loss scaling and parameter groups then act on the masters. A step is: `take_gradients`, the optimizer's
    step, `write_back`; none of them causes a host-device sync. The weights are always the rounded masters: a value that
    you write into a weight is lost at the next step.

    Parameters and statistics of batch, instance, group, layer and RMS norm stay fp32, and the optimizer steps them
    directly. All other parameters and floating-point buffers become 16 bit wide, and so do floating-point inputs of the
    network. A gradient has the type of its parameter: gradients of several backward passes add up in 16 bits.

    Args:
        model: in fp32, with its initial weights, on its device and in its memory format.
        optimizer: any optimizer over parameters of the network.
        kind: torch.bfloat16 or torch.float16.
        is_elsewhere: returns True for a parameter, by its name, whose master another rank has; the optimizer keeps its
            16-bit weight, which must get no gradient.

    Raises:
        UsageError: `kind` is another type, or the optimizer has no parameter of the network.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        kind: torch.dtype,
        *,
        is_elsewhere: Callable[[str], bool] = lambda name: False,
    ) -> None:
        if kind not in HALF_DTYPES:
            raise UsageError(f"{kind} is not a 16-bit type", fix="Give MasterWeights torch.bfloat16 or torch.float16.")
        model_ids = {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in model_ids for group in optimizer.param_groups for parameter in group["params"]):
            fix = "Make the optimizer from the parameters of the network, and its MasterWeights once."
            raise UsageError("the optimizer has no parameter of this network, and would train nothing", fix=fix)
        self._model = model
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._narrow = find_narrow(model)
        parameter: Tensor
        for name, parameter in self._narrow.items():
            if not is_elsewhere(name):
                self._masters[parameter] = nn.Parameter(
                    parameter.detach().clone(), requires_grad=parameter.requires_grad
                )
        # The optimizer keeps its groups and its state, with masters in the places of the weights.
        for group in optimizer.param_groups:
            group["params"] = [self._masters.get(parameter, parameter) for parameter in group["params"]]
        for parameter in [parameter for parameter in optimizer.state if parameter in self._masters]:
            optimizer.state[self._masters[parameter]] = optimizer.state.pop(parameter)
        # Frozen weights have masters, too, so that checkpoints hold them in fp32; but no gradients go there.
        self._trained_pairs = [(weight, master) for weight, master in self._masters.items() if weight.requires_grad]
        narrow_network(model, self._narrow, kind)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the gradients of the weights to the masters, in fp32."""
        pairs = [(weight, master) for weight, master in self._trained_pairs if weight.grad is not None]
        if not pairs:
            return
        grads: list[Any] = [weight.grad for weight, _ in pairs]
        for weight, master in pairs:
            master.grad = torch.empty_like(master)
            weight.grad = None
        # One multi-tensor copy in place of a kernel for each gradient.
        master_grads: list[Any] = [master.grad for _, master in pairs]
        torch._foreach_copy_(master_grads, grads)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies the masters into the weights, rounded to 16 bits."""
        if self._trained_pairs:
            torch._foreach_copy_(
                [weight for weight, _ in self._trained_pairs], [master for _, master in self._trained_pairs]
            )

    def list_narrow(self) -> dict[str, torch.dtype]:
        """Returns the types of the 16-bit weights by name."""
        narrow = set(map(id, self._narrow.values()))
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: value.dtype for name, value in every if id(value) in narrow}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the network's parameters by name, with masters instead of 16-bit weights."""
        for name, parameter in self._model.named_parameters():
            yield name, self._masters.get(parameter, parameter)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the network's state to save, with masters instead of 16-bit weights. Tensors are not copied."""
        state = self._model.state_dict(keep_vars=True)
        return {name: self._masters.get(value, value).detach() for name, value in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Loads the result of `state_dict` into masters and weights, in place."""
        for name, value in self._model.state_dict(keep_vars=True).items():
            if value in self._masters:
                self._masters[value].copy_(state_dict[name])
        # torch rounds the fp32 values when it copies them into 16-bit weights.
        self._model.load_state_dict(state_dict)
