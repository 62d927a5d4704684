"""`kagent devices`."""

from __future__ import annotations

import dataclasses

from kagent.cli.app import TRUST, JsonOption, app, out, print_json


@app.command(rich_help_panel=TRUST)
def devices(json_: JsonOption = False) -> None:
    """List this machine's devices: what --device takes, their state, and who uses them."""
    from kagent.devices import list_devices
    from kagent.ui.table import Column, TextTable

    found = list_devices()
    if json_:
        print_json([dataclasses.asdict(d) for d in found])
        return
    table = TextTable(
        [
            Column("device"),
            Column("model"),
            Column("state", wrap=True),
            Column("used by", wrap=True),
        ]
    )
    for d in found:
        used = "; ".join(f"process {number} ({what})" for number, what in d.turns)
        table.add_row(d.name, d.model, d.state, used or "no kagent")
    out.print(table)
    for device in found:
        if device.uuid:
            out.print(f"{device.name} is {device.uuid}")
