"""Argument names of other libraries, and what stands for them here. Messages are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# The names here, in the order in which they are looked for in a function's arguments.
RENAMED: dict[str, tuple[str, ...]] = {
    name: right
    for names, right in {
        # torch, NumPy, JAX
        "dim": ("axis", "features", "channels", "width"),
        "elems operand": ("xs", "x"),
        "input inputs arr array tensor data x": ("x", "xs", "b"),
        "fn f func function combine_fn operator": ("op", "combine"),
        "unit neutral zero": ("identity",),
        "initial h0 hx hidden carry initial_state initial_states": ("init", "state"),
        "init": ("state", "bootstrap", "initial", "zi"),
        "state": ("init",),
        "mask": ("observed",),
        "return_final_state return_last_state output_final_state return_state": ("return_final",),
        "cu_seqlens cu_seq_lens": ("offsets",),
        # layers: mamba_ssm, LRU, Griffin, torch
        "d_model hidden_size input_size embed_dim n_embd in_features": (
            "features",
            "channels",
            "width",
        ),
        "width": ("features",),
        "features": ("channels", "width"),
        "channels": ("features", "width"),
        "in_channels": ("channels", "features"),
        "lru_width": ("width",),
        "d_state state_size d_hidden n_states ssm_size": ("states",),
        "d_conv kernel_size conv1d_width conv1d_temporal_width": ("conv_width",),
        "num_heads n_heads nheads num_blocks": ("heads",),
        "r_min": ("min_radius",),
        "r_max": ("max_radius",),
        "dt_min": ("min_step",),
        "dt_max": ("max_step",),
        "dt": ("delta",),
        # recurrences
        "gates coefficients decay": ("a",),
        "tokens": ("b",),
        # reinforcement learning
        "gamma": ("discount",),
        "lam lambda_ lmbda gae_lambda": ("decay",),
        "next_value last_value last_values bootstrap_value": ("bootstrap",),
        "dones terminal terminated terminations": ("done",),
        # hidden Markov models and Kalman filters
        "initial_distribution initial_probs initial_prob startprob pi": ("initial",),
        "transition_matrix transition_probs transmat": ("transition", "F"),
        "log_likelihoods log_likelihood likelihoods emission": ("likelihood",),
        "observations emissions measurements": ("y", "likelihood"),
        "dynamics_matrix transition_matrices": ("F",),
        "emission_matrix observation_matrix observation_matrices": ("H",),
        "dynamics_covariance transition_covariance process_noise": ("Q",),
        "emission_covariance observation_covariance measurement_noise": ("R",),
        "initial_mean initial_state_mean m0 x0": ("mean",),
        "initial_covariance initial_state_covariance P0 P": ("covariance",),
    }.items()
    for name in names.split()
}


class Instead(NamedTuple):
    """What to do in place of an argument that does not exist here.

    needs: the argument that the advice speaks of; a function without it gets no such advice. NAME
    in the advice stands for the name that was passed.
    """

    advice: str
    needs: str = ""


_OF_INDICES = Instead(
    "pass the boundaries of the sequences, [S + 1], as offsets=; of sorted indices they are "
    "torch.searchsorted(NAME, torch.arange(S + 1))",
    "offsets",
)
_OF_LENGTHS = Instead(
    "pass offsets=assocscan.offsets_of(NAME)",
    "offsets",
)
_OF_CARRIES = Instead(
    "associative_scan takes it, with ops.sum, ops.prod, ops.max, ops.min or ops.logaddexp",
    "inclusive",
)
INSTEAD: dict[str, Instead] = {
    "init": _OF_CARRIES,
    "return_final": _OF_CARRIES,
    "missing": Instead("pass valid=~missing", "valid"),
    "mask": Instead("pass valid=mask, True where x counts", "valid"),
    "combine_mode": Instead("every operator is taken, pointwise or not: leave it out"),
    "exclusive": Instead("pass inclusive=False for an exclusive scan", "inclusive"),
    "inclusive": Instead(
        "h before each step is associative_scan(ops.affine, (a, b), axis, inclusive=False, "
        "init=(1.0, init))[1]",
        "b",
    ),
    "reverse": Instead("flip the tensors that have L, and y, along it", "delta_softplus"),
    "out": Instead("results are new tensors: leave it out"),
    "chunk_size": Instead("tiles are chosen by the engine: leave it out"),
    "unroll": Instead("loops are unrolled by the engine: leave it out"),
    "packed_info": Instead(
        "pass the boundaries of the sequences, [S + 1], as offsets=: the starts, and the end of "
        "the last one",
        "offsets",
    ),
    "ray_indices": _OF_INDICES,
    "indices": _OF_INDICES,
    "segment_ids": _OF_INDICES,
    "seq_idx": _OF_INDICES,
    "lengths": _OF_LENGTHS,
    "seqlens": _OF_LENGTHS,
    # rlax, whose V-trace has it
    "lambda_": Instead("there is no λ, as if it were 1: leave it out", "clip_c"),
    "lam": Instead("there is no λ, as if it were 1: leave it out", "clip_c"),
    # pandas
    "span": Instead("pass alpha=2 / (span + 1)", "alpha"),
    "com": Instead("pass alpha=1 / (com + 1)", "alpha"),
    "halflife": Instead("pass alpha=1 - 0.5 ** (1 / halflife)", "alpha"),
    "times": Instead(
        "averages at irregular times are associative_scan(ops.ema, (x, decay), axis), variances "
        "ops.ema_variance, where decay, in the shape of x, is 0.5 ** (NAME.diff(prepend=NAME[:1]) "
        "/ halflife), that of the time since the step before: docs/which_function.md shows how",
        "alpha",
    ),
    "min_periods": Instead(
        "leave it out, and put NaN where cumsum(~x.isnan()) is below min_periods", "alpha"
    ),
    # torch.nn.GRU and LSTM
    "batch_first": Instead("x is [B, L, features]: leave it out", "features"),
    "num_layers": Instead(
        "this is one layer: make several, and call each on the output of the one before", "features"
    ),
    "bidirectional": Instead(
        "assocscan.nn.Bidirectional joins two layers, one for each direction", "features"
    ),
}

# For `offsets` where a function of x and an axis has none.
OF_PACKED = (
    "put each sequence on a row of its own, assocscan.to_padded(x, offsets, axis=…), and pass "
    "axis=1; from_padded(rows, lengths_of(offsets)) packs results again"
)

# The same for `run_length_encode`, whose only argument is x.
OF_RUNS = (
    "encode one sequence after the other: [assocscan.run_length_encode(part) for part in "
    "x.split(assocscan.lengths_of(offsets).tolist())]"
)

# For layers with the arguments `features` and `width` alone, as torch.nn.GRU and LSTM name them.
OF_CELLS = {"hidden_size": "width"}

# For `windowed`: no other function has both `width` and `offsets`.
OF_WINDOWS = {
    "window": "the number of steps is width",
    "window_size": "the number of steps is width",
    "min_periods": (
        "leave it out, and put NaN where windowed(ops.count, ~x.isnan(), width, axis) is below "
        "min_periods: docs/windows.md shows how"
    ),
    "center": "leave it out, and move the results: docs/windows.md shows how",
}

# Names of operators, and those here.
OPERATORS = {
    "add": "sum",
    "plus": "sum",
    "cumsum": "sum",
    "mul": "prod",
    "multiply": "prod",
    "product": "prod",
    "cumprod": "prod",
    "maximum": "max",
    "amax": "max",
    "minimum": "min",
    "amin": "min",
    "logsumexp": "logaddexp",
    "bitwise_xor": "xor",
    "logical_and": "all",
    "logical_or": "any",
    "average": "mean",
    "var": "welford",
    "variance": "welford",
    "std": "welford",
    "median": "",  # has no operator: elements would grow
}


# Names of arguments that mark where a scan starts afresh, in other libraries. `segmented` does it
# where a function has no such argument here.
RESETS = ("resets", "reset_mask", "is_start", "starts", "segments")


def advice_on_resets(known: Sequence[str]) -> str:
    """What to do in place of one of `RESETS`, or of `reset`.

    known: the arguments of the function that was called.
    """
    if "width" in known:
        return (
            "a window that does not reach back over a step where a mask is True is that of "
            "windowed(segmented(op), (xs, reset), width)"
        )
    if "reset" in known:
        return "pass reset=…, a mask of the steps with which the scan starts afresh"
    if "offsets" in known and "op" not in known:
        return (
            "pass the boundaries of the stretches, [S + 1], as offsets=; of a mask [B, L], True at "
            "the first step of each row too, they are cat([mask.flatten().nonzero().flatten(), "
            "tensor([B * L])]), for x.flatten(0, 1) as one long sequence"
        )
    said = (
        "a scan that starts afresh where a mask is True is "
        "associative_scan(segmented(op), (xs, reset)), for an operator"
    )
    if "offsets" not in known:
        return said
    return f"pass the boundaries of the stretches as offsets=; {said}"
