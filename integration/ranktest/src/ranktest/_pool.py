"""Pools of ranks that stay alive for a whole test session."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

from ranktest import _rank
from ranktest._errors import RankError, RankFailure
from ranktest._member import Member
from ranktest._rank import COLLECTIVE_TIMEOUT_S, Raised, Returned

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
Answers = Mapping[int, Returned | Raised | None]
"""By rank: an answer, None where the process died; a silent rank is missing."""

_REJOIN_LIMIT_S = 5.0
_STACKS_LIMIT_S = 5.0
_EXIT_LIMIT_S = 5.0


class RankPool:
    """Processes that form one gloo group and run functions on demand.

    They start at the first `run` and stay. After a failure the next `run` starts afresh: with a new
    process group if every rank had answered, with new processes if one died or was silent.
    All processes see the environment variables of the moment when the first of them was started.

    Args:
        num_ranks: Number of ranks, at least 1.
        limit_s: Seconds that one `run` may take.
        start_limit_s: Seconds for starting the processes and joining the group. A limit of its own:
            the first start imports torch, and a slow import is no hang.
        grace_s: Seconds in which the others may still answer once a rank has failed.
        collective_timeout_s: Seconds after which a collective of the default group raises.
        import_paths: Folders that the ranks import from, besides those of this process.

    Raises:
        ValueError: `num_ranks` is less than 1.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        limit_s: float = 30.0,
        start_limit_s: float = 120.0,
        grace_s: float = 2.0,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
        import_paths: Sequence[str] = (),
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        self.num_ranks = num_ranks
        self.limit_s = limit_s
        self.start_limit_s = start_limit_s
        self.grace_s = grace_s
        self.collective_timeout_s = collective_timeout_s
        self.import_paths = tuple(import_paths)
        self._members: list[Member] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_stores = 0
        self._must_rejoin = False

    def run(
        self,
        function: Callable[[int, *Ts], R],
        /,
        *args: *Ts,
        limit_s: float | None = None,
        retire: bool = False,
    ) -> list[R]:
        """Call ``function(rank, *args)`` on every rank.

        Then all ranks meet in a barrier, so that a collective which only some of them issued fails
        in this run and not in the next.

        Args:
            function: A function defined at module level; it is sent by name.
            args: Its further arguments. Tensors are copied.
            limit_s: Seconds that this run may take; None takes the pool's.
            retire: The function breaks its process group on purpose. There is no barrier, and the
                ranks are ended.

        Returns:
            The results in rank order. Tensors in them are copies.

        Raises:
            RankError: A rank raised, died or was silent when time was up.
            TypeError: The function or an argument cannot be pickled.
        """
        name = function.__qualname__ if isinstance(function, FunctionType) else repr(function)
        call = _pickle_call(_rank.run_seeded, function, args)
        limit_s = self.limit_s if limit_s is None else limit_s
        self._ensure_ready()
        results = self._call(call, f"{name} on {self.num_ranks} ranks", limit_s)
        if retire:
            self._end_ranks()
        else:
            self._call(_pickle_call(_rank.meet), f"the barrier after {name}", limit_s)
        return results

    def close(self) -> None:
        """End the ranks. A later `run` starts new ones."""
        self._end_ranks(limit_s=_EXIT_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ensure_ready(self) -> None:
        if self._members and self._must_rejoin:
            try:
                self._join_group("joining a new group", _REJOIN_LIMIT_S)
            except RankError:  # a collective of the failed run may still be pending
                self._end_ranks()
        if not self._members:
            self._folder = tempfile.TemporaryDirectory(prefix="ranktest-")
            self._members = [
                Member(rank, Path(self._folder.name, f"stacks-{rank}"), self.import_paths)
                for rank in range(self.num_ranks)
            ]
            self._join_group(f"starting {self.num_ranks} ranks", self.start_limit_s)

    def _join_group(self, what: str, limit_s: float) -> None:
        assert self._folder is not None
        self._num_stores += 1  # a store serves one group
        store = str(Path(self._folder.name, f"store-{self._num_stores}"))
        call = _pickle_call(_rank.join, self.num_ranks, store, self.collective_timeout_s)
        self._call(call, what, limit_s)
        self._must_rejoin = False

    def _call(self, call: bytes, what: str, limit_s: float) -> list[Any]:
        try:
            for member in self._members:
                member.send(call, limit_s)
            answers = self._collect(limit_s)
            failures = self._find_failures(answers, limit_s)
        except BaseException:  # interrupted: nobody knows what the ranks are doing
            self._end_ranks()
            raise
        if not failures:
            returned = (answers[rank] for rank in range(self.num_ranks))
            return [
                pickle.loads(answer.result) for answer in returned if isinstance(answer, Returned)
            ]
        self._must_rejoin = True
        if any(failure.kind != "raised" for failure in failures):
            self._end_ranks()
        raise RankError(what, failures)

    def _collect(self, limit_s: float) -> Answers:
        """Wait until all ranks have answered, time is up, or a failure's grace is over."""
        answers: dict[int, Returned | Raised | None] = {}
        deadline_s = time.monotonic() + limit_s
        while len(answers) < self.num_ranks:
            missing = [rank for rank in range(self.num_ranks) if rank not in answers]
            ready = wait(
                [part for rank in missing for part in self._members[rank].waitables],
                max(0.0, deadline_s - time.monotonic()),
            )
            if not ready:
                break
            for rank in missing:
                if any(part in ready for part in self._members[rank].waitables):
                    answers[rank] = self._members[rank].receive()
                    if not isinstance(answers[rank], Returned):
                        deadline_s = min(deadline_s, time.monotonic() + self.grace_s)
        return answers

    def _find_failures(self, answers: Answers, limit_s: float) -> list[RankFailure]:
        silent = [rank for rank in range(self.num_ranks) if rank not in answers]
        self._dump_stacks(silent)
        silence = f"was silent for {limit_s:g} s"
        if not all(isinstance(answer, Returned) for answer in answers.values()):
            silence = f"was silent for {self.grace_s:g} s after another rank failed"
        failures = []
        for rank, member in enumerate(self._members):
            answer = answers.get(rank)
            if rank in silent:
                failures.append(RankFailure(rank, "silent", silence, member.read_stacks()))
            elif answer is None:
                failures.append(
                    RankFailure(rank, "died", member.describe_exit(), member.read_stacks())
                )
            elif isinstance(answer, Raised):
                failures.append(
                    RankFailure(rank, "raised", f"raised {answer.exception}", answer.trace)
                )
        return failures

    def _dump_stacks(self, ranks: Sequence[int]) -> None:
        members = [self._members[rank] for rank in ranks if self._members[rank].ask_for_stacks()]
        deadline_s = time.monotonic() + _STACKS_LIMIT_S
        while not all(member.read_stacks() for member in members) and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def _end_ranks(self, *, limit_s: float = 0.0) -> None:
        """Give all ranks together `limit_s` to exit by themselves, then kill them."""
        deadline_s = time.monotonic() + limit_s
        for member in self._members:
            member.pipe.close()
        for member in self._members:
            member.end(max(0.0, deadline_s - time.monotonic()))
        self._members = []
        self._must_rejoin = False
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class RankPools:
    """Pools by number of ranks, each made when first asked for.

    Args:
        import_paths: Folders that the ranks import from, besides those of this process.
    """

    def __init__(self, *, import_paths: Sequence[str] = ()) -> None:
        self.import_paths = tuple(import_paths)
        self._pools: dict[int, RankPool] = {}

    def __call__(self, num_ranks: int) -> RankPool:
        """Give the pool of `num_ranks` ranks, the same one at every call."""
        if num_ranks not in self._pools:
            self._pools[num_ranks] = RankPool(num_ranks, import_paths=self.import_paths)
        return self._pools[num_ranks]

    def close(self) -> None:
        """End the ranks of every pool."""
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _pickle_call(function: Callable[..., Any], *args: Any) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"run: the function and its arguments are sent by pickle ({error}); "
            "define the function at module level and pass plain data"
        ) from error
