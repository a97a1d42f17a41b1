"""Draw the chart's dashboards as SVG from a recorded run, or from a live Prometheus.

From the root: `python -m deploy.pictures draw` writes docs/dashboards from the recording; `check` fails if a picture is
not of today's dashboard; `record` trains the demo and replaces the recording; `live` draws a release that runs now.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from deploy.dashboards.live import FOLDER, CannotCheck
from deploy.pictures.drawing import COMMAND, HERE, PICTURES, draw_live, draw_recording, stale
from deploy.pictures.recorded_run import record_demo


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.pictures", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="write the pictures of docs/ from the recording")
    drawing.add_argument("--out", type=Path, default=PICTURES, help="folder (default: docs/dashboards)")
    commands.add_parser("check", help="fail if a picture is not of today's dashboard and recording")
    recording = commands.add_parser("record", help="train the demo for some minutes and replace the recording")
    recording.add_argument("--minutes", type=float, default=10.0, help="after the warm start (default: %(default)s)")
    live = commands.add_parser("live", help="draw a release that a Prometheus scrapes now")
    live.add_argument("--prometheus", required=True, help="URL")
    live.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    live.add_argument("--namespace", default="default", help="of the release (default: %(default)s)")
    live.add_argument("--release", default="nouscoder", help="name given to helm install (default: %(default)s)")
    live.add_argument("--over-s", type=float, default=3600.0, help="seconds to look back (default: %(default)s)")
    live.add_argument("--window", default="5m", help="the dashboards' Window (default: %(default)s)")
    live.add_argument("--rate-interval", default="1m", help="Grafana's $__rate_interval (default: %(default)s)")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Do what the command line says. Returns the exit code. Raises CannotCheck."""
    if options.command == "check":
        old = stale(PICTURES, HERE, FOLDER)
        if old:
            sys.stderr.write(f"no picture of today's dashboard: {', '.join(old)}: run {COMMAND}\n")
        return int(bool(old))
    if options.command == "record":
        num_samples = record_demo(HERE, 60 * options.minutes)
        sys.stdout.write(f"{num_samples} samples; now run {COMMAND}\n")
        return 0
    if options.command == "live":
        variables = {name: getattr(options, name) for name in ("namespace", "release", "window")}
        variables["__rate_interval"] = options.rate_interval
        empty = draw_live(options.prometheus, variables, options.over_s, options.out)
    else:
        empty = draw_recording(HERE, options.out)
    for one in empty:
        sys.stdout.write(f"no data: {one}\n")
    sys.stdout.write(f"the pictures are in {options.out}\n")
    return 0


def main() -> int:
    """Returns the exit code: 0, 1 if `check` fails, 2 if something cannot be read."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes started here end
    try:
        return run(parse())
    except CannotCheck as error:
        sys.stderr.write(f"deploy.pictures: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
