"""Handlers that tests run in confined children."""

import os
import time
import traceback


def execute(context):
    """Run Python source that the client sends; answer with its `result`, or with what it raised."""
    names = {"context": context, "os": os, "time": time}
    while True:
        source = context.channel.recv(60.0).obj
        if source is None:
            return
        names["result"] = None
        try:
            exec(source, names)
            context.channel.send({"result": names["result"]})
        except Exception as e:  # noqa: BLE001 - the client asserts on it
            answer = {"raised": type(e).__name__, "errno": getattr(e, "errno", None)}
            context.channel.send({**answer, "text": traceback.format_exc()})


def ask(child, source, timeout_s=30.0):
    """Client's side of `execute`: the result, or the name of the exception that was raised."""
    child.channel.send(source)
    answer = child.channel.recv(timeout_s).obj
    return answer["raised"] if "raised" in answer else answer["result"]
