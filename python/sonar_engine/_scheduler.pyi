"""The Rust scheduler. Ids of requests are non-negative; arrays are numpy int32 unless named otherwise, contiguous.

Errors: `ConfigError` for options and arguments that cannot work, `InvalidRequestError` and `QueueFullError` at submit,
`StaleStepError` for a step that is not in flight, `VerdictError` for a verdict that does not fit its step (which stays
in flight), `EngineDeadError` after an internal failure, `TypeError` for arrays of another dtype or dimension.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

__all__ = [
    "CpuAttention",
    "CpuKernels",
    "CpuWeight",
    "Events",
    "Scheduler",
    "Stats",
    "__version__",
]

__version__: str

@final
class Scheduler:
    """Plans steps for a set of requests. Every method may be called from any thread and releases the interpreter's
    lock while it works; steps are planned, then committed or reverted, by one thread at a time."""

    def __new__(
        cls,
        *,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        max_waiting: int,
        enable_prefix_caching: bool,
        num_speculative_tokens: int,
        eos_token_ids: npt.NDArray[np.int32],
        cache_key: bytes,
        speculate_in_mixed_batches: bool = False,
        page_hash_covers_next_token: bool = False,
    ) -> Scheduler:
        """`num_pages` must hold one sequence of `max_model_len` tokens; `cache_key` is 32 secret bytes.

        At most min(`max_num_seqs`, `max_num_batched_tokens`) requests run at once. `page_hash_covers_next_token`: a
        page of the prefix cache is found again only where the token after it is the same too.
        """

    @property
    def slot_words(self) -> int:
        """Words of a packed slot."""

    def slot(self, index: int) -> npt.NDArray[np.int32]:
        """Packed slot 0 or 1, a view of the same memory at each call. `step_buffers` names its parts.

        It may be read from the return of a plan into it until the next plan into it.
        """

    def submit(
        self,
        request_id: int,
        prompt: npt.NDArray[np.int32],
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        stop_token_ids: npt.NDArray[np.int32] | None = None,
        ignore_eos: bool = False,
        priority: int = 0,
        cache_salt: bytes | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        """Checks the request and queues it; never waits for planning. Lower `priority` runs earlier.

        A stop token at an output index below `min_tokens` does not stop. `num_speculative_tokens` 0: never draft.
        """

    def abort(self, request_id: int) -> None:
        """Ends a request; its one final event comes with the commit of the step in flight, or with `poll`.

        An id without a request is ignored.
        """

    def plan(self, slot: int, draft_lens: npt.NDArray[np.int32] | None) -> int | None:
        """Plans the next step into packed slot `slot` and returns its id; None: nothing can run.

        `draft_lens` [max_num_seqs], by slot: most drafts each can take; the plan may grant fewer. None: no drafts.
        """

    def start_plan(self, slot: int, draft_lens: npt.NDArray[np.int32] | None) -> None:
        """Starts `plan` on the planner thread."""

    def take_plan(self) -> int | None:
        """Waits for the plan that was started and returns what it gave."""

    def adapt_draft_length(self, points: Sequence[tuple[int, int, float]]) -> None:
        """From now on rows draft as many tokens as pay, by their acceptance and by what steps cost.

        `points` are measured steps to begin with: (decode rows, drafts of each, seconds), two draft lengths or more at
        each number of rows, else `ConfigError`. Counters of prefix hits and preemptions start anew.
        """

    def commit(
        self,
        step_id: int,
        num_emitted: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        seconds: float | None = None,
    ) -> Events:
        """Ends the step in flight.

        `seconds`: from the end of the step before to the end of this one, where one followed the other.
        `num_emitted` [num_reqs]: 0 where a row does not sample, else accepted drafts + 1; `tokens`
        [num_reqs, width]: accepted drafts, then the recovered or bonus token.
        """

    def revert(self, step_id: int) -> None:
        """Undoes the step in flight, which did not run."""

    def poll(self) -> Events | None:
        """Final events of requests that ended outside a commit; None: there are none."""

    def has_work(self) -> bool:
        """Whether a request waits, runs, or has a final event that `poll` or `commit` has not returned yet."""

    def request_tokens(self, request_id: int) -> npt.NDArray[np.int32]:
        """Prompt and output tokens so far of a live request that has been planned or polled."""

    def num_prompt_tokens(self, request_id: int) -> int:
        """Prompt tokens of a live request that has been planned or polled."""

    def propose_ngram(
        self,
        k: int,
        min_n: int,
        max_n: int,
        out_tokens: npt.NDArray[np.int32],
        out_lens: npt.NDArray[np.int32],
    ) -> int:
        """Drafts what followed the most recent earlier occurrence of each decoding request's last tokens.

        A match has `min_n` to `max_n` (at most 16) tokens, the longest wins. By slot: up to `k` tokens into
        `out_tokens` [max_num_seqs, k], their number into `out_lens` [max_num_seqs], 0 for slots without. Returns
        the number of draft tokens.
        """

    def stats(self) -> Stats:
        """Counts of this moment."""

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; later requests share nothing with earlier ones. Returns whether all pages are
        free now, that is, no request holds any."""

    def check_integrity(self) -> None:
        """Checks every invariant of the scheduler (a pass over all pages); raises `EngineDeadError` on a breach."""

@final
class Events:
    """Columns of what one commit or poll told, one event a request. E = events, N = tokens of all of them.

    Each access makes a new array.
    """

    @property
    def request_ids(self) -> npt.NDArray[np.int64]:
        """[E]"""
    @property
    def num_tokens(self) -> npt.NDArray[np.int32]:
        """[E], new tokens of each event; they follow one another in `tokens`."""
    @property
    def finish(self) -> npt.NDArray[np.int32]:
        """[E], index in `events.FINISH_REASONS`; 0 while the request runs on."""
    @property
    def stop_tokens(self) -> npt.NDArray[np.int32]:
        """[E], the user's stop token that ended it, -1 for none."""
    @property
    def num_drafted(self) -> npt.NDArray[np.int32]:
        """[E], drafts verified in this step."""
    @property
    def num_accepted(self) -> npt.NDArray[np.int32]:
        """[E], of these, accepted by verification, also beyond a stop."""
    @property
    def num_cached(self) -> npt.NDArray[np.int32]:
        """[E], prompt tokens found in the prefix cache at first admission."""
    @property
    def num_preemptions(self) -> npt.NDArray[np.int32]:
        """[E], of the request so far."""
    @property
    def batch_rows(self) -> npt.NDArray[np.int32]:
        """[E], row of the committed batch, -1 for none."""
    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[N]"""
    def __len__(self) -> int: ...

@final
class Stats:
    """Counts of one moment."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int:
        """Without owner and content."""
    @property
    def num_cached_pages(self) -> int:
        """Without owner, in the prefix cache."""
    @property
    def prefix_queries(self) -> int:
        """Tokens looked up in the prefix cache at first admissions."""
    @property
    def prefix_hits(self) -> int:
        """Tokens found there."""
    @property
    def num_preemptions(self) -> int: ...
    @property
    def waiting_tokens(self) -> int: ...
    @property
    def draft_length(self) -> int:
        """Most drafts of a row now."""

@final
class CpuWeight:
    """A weight matrix in the kernels' own layout."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
    def dequantized(self, row: int) -> list[float]:
        """A row of a quantised weight as the product sees it."""

@final
class CpuKernels:
    """Row-wise operations and products over packed weights.

    Pointers are addresses of tensors that the caller keeps alive; strides are in elements; dtype codes are
    0 float32, 1 bfloat16, 2 float16.
    """

    def __new__(cls, num_threads: int, force_scalar: bool = False) -> CpuKernels: ...
    @property
    def level(self) -> str:
        """Name of the vector level in use."""
    def pack(
        self, weight: int, stride: int, out_features: int, in_features: int, dtype_code: int, bias: int, bits: int = 0
    ) -> CpuWeight:
        """Packs a weight [out_features, in_features]; `bias` is fp32 [out_features], 0 for none. `bits` 4 or 8
        quantises it in groups of 32 input features, 0 keeps it as it is."""
    def linear(
        self,
        weight: CpuWeight,
        rows: int,
        x: int,
        x_stride: int,
        x_dtype: int,
        y: int,
        y_stride: int,
        y_dtype: int,
    ) -> None:
        """y [rows, out] = x [rows, in] W^T + b."""
    def rms_norm(
        self,
        rows: int,
        cols: int,
        dtype_code: int,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        weight: int,
        y: int,
        y_stride: int,
        eps: float,
    ) -> None:
        """y = rms_norm(x) * weight; with `residual` not 0, `residual += x` first and the sum is normalised."""
    def rope(
        self,
        rows: int,
        head_dim: int,
        dtype_code: int,
        q: int,
        q_stride: int,
        num_q_heads: int,
        k: int,
        k_stride: int,
        num_kv_heads: int,
        positions: int,
        cos_sin: int,
    ) -> None:
        """Rotates q [rows, num_q_heads, head_dim] and k in place by the angles of `positions`."""
    def silu_and_mul(self, rows: int, cols: int, dtype_code: int, x: int, x_stride: int, y: int, y_stride: int) -> None:
        """y [rows, cols] = silu(x[:, :cols]) * x[:, cols:]."""
    def gumbel_argmax(
        self,
        rows: int,
        vocab: int,
        logits: int,
        stride: int,
        inv_temperature: int,
        seed_lo: int,
        seed_hi: int,
        counter: int,
        out: int,
    ) -> None:
        """A token a row: argmax of logits * inv_temperature + Gumbel noise of (id, seed, counter); int32 into `out`."""

@final
class CpuAttention:
    """Attention of one model over its paged caches [num_pages, 2, page_size, num_kv_heads, head_dim]."""

    def __new__(
        cls,
        kernels: CpuKernels,
        caches: Sequence[int],
        dtype_code: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window: int,
        scale: float,
    ) -> CpuAttention: ...
    def begin(
        self,
        num_reqs: int,
        num_tokens: int,
        qo_indptr: int,
        slots: int,
        positions: int,
        slot_mapping: int,
        page_table: int,
        page_table_stride: int,
    ) -> None:
        """Takes the addresses of a step's int32 arrays; they stay alive until its last `forward`."""
    def forward(
        self,
        layer: int,
        num_q_heads: int,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        out: int,
    ) -> None:
        """Writes k and v of all tokens into the layer's cache and attends; `out` is [T, num_q_heads * head_dim]."""
