"""Imported by the replayer's fork-servers, last: forks find warm what recording needs."""

from __future__ import annotations

from kagent_sandbox.builder.trace.dynamo import keep_dynamo_out

keep_dynamo_out()
