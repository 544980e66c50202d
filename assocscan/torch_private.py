"""Everything that the package uses of torch's private parts, each under a name of its own.

No other module names a private part of torch (`tests/test_torch_private.py`): a new version of
torch is checked here. Functions are bound as they are, without a wrapper: the host path of every
call asks some of them, and Dynamo knows them by identity. Modules that torch imports late are
imported inside functions here.

Checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch._decomp
import torch._functorch.autograd_function
import torch._functorch.pyfunctorch
import torch._functorch.vmap
import torch._guards
import torch._subclasses.fake_tensor
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import distributed as dist
from torch.autograd import forward_ad

_C: Any = torch._C
_FUNCTORCH: Any = torch._C._functorch

# ---- Pytrees ----

# torch's own pytrees, with the registry that users extend: to flatten and rebuild xs and results.
pytree = torch.utils._pytree
# Gives a named tuple the name by which `torch.export.save` writes it: without one it refuses.
register_namedtuple: Callable[..., None] = torch.utils._pytree._register_namedtuple

# ---- The state of a thread, asked on the host path of calls (`torch_state`) ----

# The innermost torch.func transform, None outside of them: whether one is at work.
peek_interpreter_stack: Callable[[], Any] = _FUNCTORCH.peek_interpreter_stack
# All of them, outermost first, as objects with a `key()`, None outside: how many differentiate.
interpreter_stack: Callable[[], Any] = _FUNCTORCH.get_interpreter_stack
# How many `TorchDispatchMode`s are active: whether somebody records operations.
len_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
# What torch.jit.trace records into, None outside of it: whether it runs, and to pause it.
jit_tracing_state: Callable[[], Any] = _C._get_tracing_state
set_jit_tracing_state: Callable[[Any], None] = _C._set_tracing_state
# Whether forward mode is switched on in this thread: whether tensors can carry tangents.
is_forward_mode_enabled: Callable[[], bool] = _C._is_fwd_grad_enabled
# The variable of `torch.autograd.forward_ad` that holds the level of forward mode, −1 outside.
FORWARD_LEVEL = "_current_level"
# Whether saved-tensor hooks may run here: whether there is something to hide from the caller's.
are_saved_tensors_hooks_enabled: Callable[[], bool] = _C._autograd._saved_tensors_hooks_is_enabled

# The hooks that pack what autograd saves, None without: activation checkpointing has such ones.
saved_tensors_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks

# ---- What tensors are ----

# Whether a tensor stands for another one in a torch.func transform: such a one has no storage.
is_functorch_tensor: Callable[[Any], bool] = _FUNCTORCH.is_functorch_wrapped_tensor
# Whether torch.func.vmap maps it, at which of its levels, over which dimension of which tensor: how
# many chains there are in all.
is_mapped_tensor: Callable[[Any], bool] = _FUNCTORCH.is_batchedtensor
level_of: Callable[[Any], int] = _FUNCTORCH.maybe_get_level
mapped_dimension: Callable[[Any], int] = _FUNCTORCH.maybe_get_bdim
unwrapped: Callable[[Any], torch.Tensor] = _FUNCTORCH.get_unwrapped
# Whether it is a batch of `torch.autograd.grad(is_grads_batched=True)`: such cotangents are mapped.
is_legacy_batch: Callable[[Any], bool] = _FUNCTORCH.is_legacy_batchedtensor
# Whether it is a zero without memory: such tangents are left out.
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor


def storage_number(t: torch.Tensor) -> int:
    """What tells storages apart, those of fake tensors too: which results alias an argument."""
    return int(t.untyped_storage()._cdata)


def is_jagged(t: Any) -> bool:
    """Whether it is a nested tensor with one ragged dimension."""
    return isinstance(t, torch.Tensor) and t.layout is torch.jagged


def ragged_dimension(t: Any) -> int:
    """The ragged dimension of a jagged tensor, counted with its batch dimension."""
    return int(t._ragged_idx)


def jagged_like(values: torch.Tensor, like: Any, offsets: torch.Tensor | None) -> torch.Tensor:
    """These values as a jagged tensor with the offsets of another one, which it then lines up with
    in torch's operations, or with others. torch's public function for it cannot be traced."""
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets

    # The least and the greatest length, where they are known, go with the offsets.
    known: dict[str, Any] = {}
    if offsets is None:
        offsets = like.offsets()
        known = {"min_seqlen": like._maybe_min_seqlen, "max_seqlen": like._maybe_max_seqlen}
    return nested_view_from_values_offsets(values, offsets, ragged_dimension(like), **known)  # type: ignore[no-any-return]


# ---- Overridden functions and dispatch (`api/tensor_subclasses`, `torch_state`) ----

# What classes hold as `__torch_function__` and `__torch_dispatch__` if they do not override them.
NO_TORCH_FUNCTION: Any = _C._disabled_torch_function_impl
NO_TORCH_DISPATCH: Any = _C._disabled_torch_dispatch_impl
# Whether `__torch_function__` of classes is asked, and whether a `TorchFunctionMode` is active:
# whether a call is handed over.
is_torch_function_enabled: Callable[[], bool] = _C._is_torch_function_enabled
is_torch_function_mode_enabled: Callable[[], bool] = _C._is_torch_function_mode_enabled
# Context: `__torch_function__` of classes is not asked; with the first, modes are not either.
WithoutTorchFunction: Any = _C.DisableTorchFunction
WithoutTorchFunctionOfClasses: Any = _C.DisableTorchFunctionSubclass
# Context: both are asked again within the former: to see which functions an operator calls.
WithTorchFunction: Any = _C._EnableTorchFunction
# The base of dispatch modes, as torch documents it: to see which operations run.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
# Those that are active: whether one of them traces.
dispatch_modes: Callable[[], Any] = torch.utils._python_dispatch._get_current_dispatch_mode_stack

# ---- Tracing outside of everything that surrounds a call (`trace`) ----

# Contexts: no torch.func transform is at work; no dispatch mode is; no compilation is under way.
without_transforms: Any = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
without_dispatch_modes: Any = torch.utils._python_dispatch._disable_current_modes
compiling_in: Any = torch._guards.tracing  # of None
# The mode in which tensors have no memory: an operator is run in it to find the line of an error.
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
# Operations in terms of ATen's core: the table of decompositions for `make_fx`.
core_aten_decompositions: Callable[[], Any] = torch._decomp.core_aten_decompositions
# Modules by name: of fake tensors' errors and what logs them; of the classes of torch's operations.
FAKE_TENSORS = "torch._subclasses"
LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.proxy_tensor")
OPERATIONS = "torch._ops"


def schema_of(operation: Any) -> Any:
    """The schema of an ATen operation, None for what is none: what an operator writes to."""
    return getattr(operation, "_schema", None)


def one_symbol_per_size() -> Any:
    """A context in which make_fx gives equal sizes one symbol, whatever torch.compile's setting: a
    sum of tensors of one shape then asks nothing of their sizes."""
    from torch.fx.experimental import _config

    settings: Any = _config
    return settings.patch(use_duck_shape=True)


# ---- Autograd (`runtime`) ----

# An autograd function that acts on one level of torch.func's transforms. `torch.autograd.Function`,
# which derives from it, hands a call to all levels, which the operation (`library`) has done
# already, and looks up the signature of `forward` at every call (15 µs).
if TYPE_CHECKING:
    SingleLevelFunction = torch.autograd.Function
else:
    SingleLevelFunction = torch.autograd.function._SingleLevelFunction
# Context: such a function may be applied under a transform.
single_level_functions: Any = (
    torch._functorch.autograd_function.enable_single_level_autograd_function  # type: ignore[attr-defined]
)
# Context: forward mode is on or off: it is on in what runs below a level of torch.func.
forward_mode_set_to: Any = forward_ad._set_fwd_grad_enabled
# Context: operations do not reach the Autograd key, and the keys below it: to go on after it.
BelowAutograd: Any = _C._AutoDispatchBelowAutograd
KEYS_BELOW_AUTOGRAD: Any = _C._after_autograd_keyset


def autograd_reached() -> Any:
    """Context: operations reach the Autograd key again inside a kernel that lies below it, which
    computes a derivative by torch operations."""
    keys = _C.DispatchKey
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded - _C.DispatchKeySet(key)
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)


def sizes_before_expand(t: torch.Tensor) -> tuple[int, ...] | None:
    """The sizes of the tensor that `expand` repeated to make `t`; None where autograd does not know
    that it was made so: the gradient of the repeated dimensions is summed by the kernel."""
    made = t.grad_fn
    if made is None:
        return None
    if made.name() == "ExpandBackward0":
        return tuple(made._saved_self_sym_sizes)  # type: ignore[attr-defined]
    return getattr(made, "sizes_before_expand", None)  # of an autograd function that does the same


def hint_of(size: Any, unknown: int = 64) -> int:
    """A number for a size or stride that may be symbolic, without a guard on it: for a choice that
    is right whatever the size turns out to be."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else unknown


def has_hooks(t: torch.Tensor) -> bool:
    """Whether hooks on a tensor see its gradient."""
    return bool(t._backward_hooks)


def version_of(t: torch.Tensor) -> int:
    """A counter that every write to a tensor raises. Raises RuntimeError for inference tensors."""
    return t._version


# ---- The vmap that is older than torch.func (`runtime/batched_gradients`) ----

# Its level goes up or down by one, and is returned: to know which one the cotangents have.
enter_legacy_vmap: Callable[[], int] = _C._vmapmode_increment_nesting
leave_legacy_vmap: Callable[[], int] = _C._vmapmode_decrement_nesting
# A tensor into a batch of a level, and out of it.
add_batch_dim: Callable[..., torch.Tensor] = torch._add_batch_dim
remove_batch_dim: Callable[..., torch.Tensor] = torch._remove_batch_dim
# Its dispatch key, and a context in which keys are left out: what is mapped may draw numbers.
LEGACY_VMAP: Any = torch._C.DispatchKeySet(_C._parse_dispatch_key("VmapMode"))
WithoutKeys: Any = _C._ExcludeDispatchKeyGuard
# torch.vmap that also returns where the batch dimensions of the results are: to map a backward.
restore_vmap: Callable[..., Any] = torch._functorch.vmap.restore_vmap

# ---- GPUs (`cuda`) ----

# The handle of torch's current stream on a device, to launch on; None in builds without CUDA.
raw_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)

# ---- torch.compile (`torch_compile`) and the benchmarks ----


def dynamo_graph() -> torch.fx.Graph | None:
    """The graph that Dynamo is building, to cut an operator out of it; None outside of it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.graph
    except AttributeError:
        return None


def guard_in_dynamo(holds: Callable[[], bool], words: str) -> None:
    """Make Dynamo ask this before each call of what it compiles now, and compile anew where it does
    not hold; `words` say what changed, in its log. Nothing where Dynamo reads no function."""
    if torch._guards.TracingContext.try_get() is None:
        return
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource

    def create(builder: Any, guard: Any) -> None:
        root = builder.guard_manager.root
        root.add_lambda_guard(lambda _: holds(), [words], guard.user_stack)

    install_guard(GlobalStateSource().make_guard(create))


def is_made_under_dynamo(name: str) -> bool:
    """Whether a variable of the function that Dynamo reads holds a function that was made by the
    code that it reads. That function is the innermost of those whose reading is under way, which
    Dynamo keeps on Python's stack alone."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.functions import NestedUserFunctionVariable

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        reader = frame.f_locals.get("self")
        if isinstance(reader, InstructionTranslatorBase):
            return isinstance(reader.symbolic_locals.get(name), NestedUserFunctionVariable)
        frame = frame.f_back
    return False


def changed_under_dynamo() -> list[Any]:
    """What existed before, and is changed by the function that Dynamo reads: collections, objects,
    cells, modules, and a mere object for each global. The changes are made after the graph has run;
    until then only Dynamo knows of them."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects: Any = InstructionTranslator.current_tx().output.side_effects
    known = [(thing, effects.id_to_variable.get(id(thing))) for thing in effects.keepalive]
    return [
        thing
        for thing, variable in known
        if variable is not None
        and not isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew))
        and effects.is_modified(variable)
    ]


def functions_read_by_dynamo() -> int:
    """How many custom autograd functions Dynamo has read as plain formulas, in the graph that it is
    building: it makes a context for each, and nothing in the graph tells of them."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        made = InstructionTranslator.current_tx().output.side_effects.keepalive
    except AttributeError:
        return 0
    return sum(isinstance(t, torch.autograd.function.FunctionCtx) for t in made)


def torch_associative_scan() -> Callable[..., Any]:
    """torch's prototype, a peer of the benchmarks."""
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan


def torch_scan() -> Callable[..., Any]:
    """torch's prototype of a sequential scan, another peer."""
    from torch._higher_order_ops.scan import scan

    return scan


# ---- Collectives (`distributed`) ----


def all_gather_bytes(data: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The uint8 vectors of all ranks of the group of this name, one after the other, by torch's
    functional collective: an operation, so that compilers and dispatch modes see it."""
    functional: Any = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_gather_into_tensor(data, size, group))  # type: ignore[no-any-return]


def all_gather_into(received: torch.Tensor, sent: torch.Tensor, group: str) -> None:
    """The same into a given vector, without an operation for compilers: it takes less host time,
    and on NCCL no second stream."""
    # The function has this name since torch 2.14; by the older one it warns there.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group_of_name(group))


def all_to_all_bytes(data: torch.Tensor, counts: list[int], group: str) -> torch.Tensor:
    """Of a uint8 vector, `counts[q]` numbers for each rank q: those that all ranks sent here."""
    functional: Any = torch.ops._c10d_functional
    received = functional.all_to_all_single(data, counts, counts, group)
    return functional.wait_tensor(received)  # type: ignore[no-any-return]


def group_of_name(name: str) -> Any:
    """The process group of this name: a compiled graph holds the name."""
    from torch.distributed import distributed_c10d

    groups: Any = distributed_c10d
    return groups._resolve_process_group(name)
