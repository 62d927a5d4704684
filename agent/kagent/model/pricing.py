"""What calls cost, by the prices that the user states or those of the genai-prices table."""

from __future__ import annotations

from genai_prices import Usage as PricedUsage
from genai_prices import calc_price

from kagent.model.spec import ModelConfig


def dollars(
    model: ModelConfig,
    input_tokens: int | None,
    output_tokens: int | None,
    cached_tokens: int = 0,
) -> float | None:
    """Price of a call; None where no price is known, or no tokens were reported."""
    if input_tokens is None or output_tokens is None:
        return None
    if model.prices is not None:
        return (input_tokens * model.prices.input + output_tokens * model.prices.output) / 1e6
    used = PricedUsage(
        input_tokens=input_tokens, output_tokens=output_tokens, cache_read_tokens=cached_tokens
    )
    try:
        return float(calc_price(used, model.name, provider_api_url=model.base_url).total_price)
    except LookupError:
        return None


def most_dollars(model: ModelConfig, prompt_chars: int) -> float | None:
    """Upper bound of what a call may cost that is not over; None where no price is known."""
    return dollars(model, prompt_chars // 2, model.reply_tokens)
