"""Turns what went wrong with a call into one line that says what to do."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import openai

from kagent.llm.chat import join_surrogates
from kagent.llm.model_config import ModelConfig
from kagent.llm.parameters import too_much
from kagent.llm.response import member

KEY_REMEDY = "check KAGENT_API_KEY, OPENAI_API_KEY, or the variable that api_key_env names"
AGAIN = "try again later, or name another model"
ADDRESS_REMEDY = "check the base URL, which usually ends in /v1"
_QUOTA = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
_NO_MODEL = ("not exist", "not found", "not a valid model", "unknown model", "invalid model")
_NOT_FOUND = ("model_not_found", "not_found_error")
_SHOWN = 240  # characters of a server's own words
_SECRET_FROM = 8  # characters: shorter keys are placeholders such as EMPTY


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure: its description, the remedy, and facts of `ModelError`."""

    what: str
    remedy: str
    permanent: bool = False
    served: bool = False
    wait_s: float = 0.0


KEY_UNSENDABLE = Failure("the key cannot be sent in a header", KEY_REMEDY, permanent=True)


class Unusable(Exception):  # noqa: N818 - a way out of a call, never seen outside of `Endpoint`
    """The received data is no reply."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.what)
        self.failure = failure


class Scrub:
    """Makes a server's text fit to be shown and stored: without the key, in the forms that it may
    be echoed in, and without halves of characters, which no file can hold.
    """

    def __init__(self, model: ModelConfig) -> None:
        key = model.api_key.get_secret_value() if model.api_key is not None else ""
        forms = {key, urllib.parse.quote(key, safe=""), json.dumps(key)[1:-1]}
        self._forms = sorted(forms, key=len, reverse=True) if len(key) >= _SECRET_FROM else []

    def __call__(self, text: str) -> str:
        """The text as it may be shown and stored."""
        text = join_surrogates(text)
        for form in self._forms:
            text = text.replace(form, "[key]")
        return text

    def cut(self, text: str) -> str:
        """A text that was cut at a limit, which may end in the first part of the key."""
        text = self(text)
        for form in self._forms:
            for length in range(len(form) - 1, 0, -1):
                if text.endswith(form[:length]):
                    return text[:-length]
        return text


def quota_used_up(status: int, code: object, kind: object) -> bool:
    """Whether a refusal is about money, which waiting does not bring."""
    return status == 402 or code in _QUOTA or kind in _QUOTA


def words(error: openai.APIError) -> str:
    """The server's own words."""
    body = error.body
    if isinstance(body, list) and len(body) == 1:  # Google wraps its errors
        body = member(body[0], "error") or body[0]
    said = member(body, "message") or member(body, "detail") or body or error.message
    return said if isinstance(said, str) else json.dumps(said, default=str)


def shown(text: str) -> str:
    """One line of at most `_SHOWN` characters."""
    line = " ".join(text[: 20 * _SHOWN].split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} …"


def of_status(error: openai.APIStatusError, model: ModelConfig, tries: int, say: Scrub) -> Failure:
    """A reply with a status of 300 or more."""
    status = error.status_code
    text = shown(say(words(error)))
    page = text.lower().startswith(("<!doctype", "<html"))
    said = f"{status}" if page or not text else f"{status}: {text}"
    if quota_used_up(status, error.code, error.type):
        remedy = "add credit at the provider, or name another model"
        return Failure(f"quota or credit is used up ({said})", remedy, permanent=True)
    if status == 401 or (status == 400 and "api key" in text.lower()):
        what = "refused the key" if model.api_key is not None else "wants a key"
        return Failure(f"{what} ({said})", KEY_REMEDY, permanent=True)
    if status == 403:
        remedy = "check that the key may use this model, or name another one"
        return Failure(f"refused access ({said})", remedy, permanent=True)
    if status in (400, 404) and _knows_no_model(error, text):
        remedy = "check the model's name, and that the base URL is the one it is served at"
        return Failure(f"does not know the model ({said})", remedy, permanent=True)
    if status in (404, 405) or status < 400:
        remedy = f"{ADDRESS_REMEDY}, and the model's name"
        return Failure(f"serves no chat completions there ({said})", remedy, permanent=True)
    if status == 429:
        asked = _asked_to_wait(error.response, say)
        what = f"limits the rate{asked} ({said}), {_tried(tries)}"
        wait = wait_s(error.response)
        return Failure(what, "lower in_flight", served=True, wait_s=wait)
    if status >= 500 or status in (408, 409):
        what, wait = f"failed ({said}), {_tried(tries)}", wait_s(error.response)
        return Failure(what, AGAIN, served=True, wait_s=wait)
    if status == 413 or (status in (400, 422) and too_much(text)):
        remedy = f"lower reply_tokens ({model.reply_tokens}), or take a model with a larger context"
        return Failure(f"cannot take that much ({said})", remedy)
    return Failure(f"refused the request ({said})", "check the model's settings in kagent.toml")


def _knows_no_model(error: openai.APIStatusError, text: str) -> bool:
    said = text.lower()
    stated = error.code in _NOT_FOUND or error.type in _NOT_FOUND
    return stated or ("model" in said and any(words in said for words in _NO_MODEL))


def wait_s(response: httpx2.Response) -> float:
    """Seconds that Retry-After asks to wait; 0 where it says nothing, or a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0


def _asked_to_wait(response: httpx2.Response, say: Scrub) -> str:
    """Describe the wait that Retry-After asks for: seconds, or a date."""
    wait = shown(say(response.headers.get("retry-after", "")))
    if not wait:
        return ""
    until = f"{wait} s" if wait.replace(".", "", 1).isdecimal() else f"until {wait}"
    return f" and asks to wait {until}"


def of_connection(error: Exception, tries: int, say: Scrub) -> Failure:
    """No connection, or one that broke."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, socket.gaierror):
            known = cause.errno != socket.EAI_AGAIN
            return Failure("its name is not known (DNS)", "check the base URL", permanent=known)
        if isinstance(cause, ssl.SSLCertVerificationError):
            remedy = "check the base URL, or set SSL_CERT_FILE to the authority's certificates"
            text = f"its certificate is not trusted ({shown(say(str(cause)))})"
            return Failure(text, remedy, permanent=True)
        if isinstance(cause, ssl.SSLError):
            text = f"speaks no TLS ({shown(say(str(cause)))})"
            return Failure(text, "check http:// or https:// of the base URL", permanent=True)
        if isinstance(cause, ConnectionRefusedError):
            remedy = "start the server, or check the base URL"
            return Failure(f"refused the connection, {_tried(tries)}", remedy)
        if isinstance(cause, httpx2.ConnectTimeout):
            remedy = "check the base URL, the network and its proxy"
            return Failure(f"took no connection in time, {_tried(tries)}", remedy)
        if isinstance(cause, httpx2.LocalProtocolError):
            return KEY_UNSENDABLE
    text = shown(say(str(causes[-1]) or type(causes[-1]).__name__))
    remedy = "try again, or check the network and the server"
    return Failure(f"broke the connection ({text}), {_tried(tries)}", remedy)


def of_stated(error: object, say: Scrub) -> Failure:
    """An error object that came with status 200."""
    text = member(error, "message") or error
    said = shown(say(text if isinstance(text, str) else json.dumps(text, default=str)))
    code = member(error, "code")
    number = int(code) if isinstance(code, int | str) and str(code).isdecimal() else 0
    if quota_used_up(number, code, member(error, "type")):
        remedy = "add credit at the provider, or name another model"
        return Failure(f"quota or credit is used up ({said})", remedy, permanent=True)
    if number in (401, 403):
        return Failure(f"refused access ({number}: {said})", KEY_REMEDY, permanent=True)
    return Failure(f"failed in mid-reply ({said})", AGAIN, served=True)


def _tried(tries: int) -> str:
    return "asked once" if tries <= 1 else f"asked {tries} times"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it came from, the innermost last."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
