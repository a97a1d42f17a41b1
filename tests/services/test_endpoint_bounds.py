"""Every route of the grading service is in the table of bounds (docs/design/verifier-gateway.md)."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.routing import Route
from tests.services.test_openapi_document import serving

from nouscoder.verifier.access.gatekeeper import is_open_path
from nouscoder.verifier.api.compat.nemo_gym import add_nemo_gym
from nouscoder.verifier.api.remote_rewards import add_remote_rm

PAGE = Path(__file__).resolve().parents[2] / "docs/design/verifier-gateway.md"


async def test_every_route_has_bounds_of_body_values_turn_answer_and_share(tmp_path: Path) -> None:
    rows = PAGE.read_text().split("## Bounds of every call")[1].split("\n## ")[0].splitlines()
    table = [row.strip("|").split("|") for row in rows if row.startswith("| `")]
    assert all(len(row) == 6 and all(cell.strip() for cell in row) for row in table)
    bounded = {call for row in table for call in re.findall(r"`([A-Z]+ /[^`]*)`", row[0])}
    async with serving(tmp_path) as service:
        add_nemo_gym(service.app, None, lambda: None, 1000, 10_000)  # type: ignore[arg-type]
        add_remote_rm(service.app, None, lambda: None, 1000)  # type: ignore[arg-type]
        routes = {
            f"{method} {route.path}"
            for route in service.app.routes
            if isinstance(route, Route) and route.name != "refuse"
            for method in route.methods or ()
            if not (is_open_path(route.path) and "-" in route.path)
        }
    assert routes <= bounded, "a new call needs a row: body, values, turn, answer and share"
