"""Cost of calls, by the user's prices or those of the genai-prices table."""

from __future__ import annotations

from genai_prices import Usage as PricedUsage
from genai_prices import calc_price

from kagent.llm.model_config import ModelConfig

CHARS_PER_TOKEN = 2
"""Fewer than any tokenizer takes of English and source text: an upper bound of tokens."""


def dollars(
    model: ModelConfig,
    input_tokens: int | None,
    output_tokens: int | None,
    cached_tokens: int = 0,
) -> float | None:
    """Price of a call; None where no price is known, or no tokens were reported.

    What runs at a local address is not in the table, whatever its name: only the user knows.
    """
    if input_tokens is None or output_tokens is None:
        return None
    if model.prices is not None:
        return (input_tokens * model.prices.input + output_tokens * model.prices.output) / 1e6
    if model.local:
        return None
    used = PricedUsage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cache_read_tokens=min(cached_tokens, input_tokens),
    )
    try:
        return float(calc_price(used, model.name, provider_api_url=model.base_url).total_price)
    except LookupError:
        pass
    try:  # a gateway: the price is that of the model's own maker, if the name says who that is
        return float(calc_price(used, model.name).total_price)
    except LookupError:
        return None


def most_dollars(model: ModelConfig, prompt_chars: int) -> float | None:
    """Upper bound of what a call may cost that is not over; None where no price is known."""
    return dollars(model, prompt_chars // CHARS_PER_TOKEN + 1, model.reply_tokens)
