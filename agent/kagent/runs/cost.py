"""Cost of calls of a model: one call, and the sum over a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of a model. With `error`, nothing usable came back.

    `most_tokens` and `most_dollars` are the most that it can have taken: what limits count where
    the rest is not known, as of a call that failed.
    """

    ask: int
    attempt: int
    model: str
    card: str
    seconds: float
    input_tokens: int | None = None
    output_tokens: int | None = None
    dollars: float | None = None
    truncated: bool = False
    error: str = ""
    most_tokens: int = 0
    most_dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of all calls of a run so far."""

    calls: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0
    unpriced: int = 0  # calls whose price is not known: `dollars` is without them
    seconds: float = 0.0
    bound_tokens: int = 0  # that limits count: of calls whose tokens are not known the most
    bound_dollars: float = 0.0

    def and_call(self, call: ModelCall) -> Spent:
        """Return the sum with one more call."""
        unpriced = call.dollars is None and not call.error
        known = call.input_tokens is not None and call.output_tokens is not None
        tokens = (call.input_tokens or 0) + (call.output_tokens or 0)
        return Spent(
            calls=self.calls + 1,
            failed=self.failed + bool(call.error),
            input_tokens=self.input_tokens + (call.input_tokens or 0),
            output_tokens=self.output_tokens + (call.output_tokens or 0),
            dollars=self.dollars + (call.dollars or 0.0),
            unpriced=self.unpriced + unpriced,
            seconds=self.seconds + call.seconds,
            bound_tokens=self.bound_tokens + (tokens if known else call.most_tokens),
            bound_dollars=self.bound_dollars
            + (call.most_dollars if call.dollars is None else call.dollars),
        )
