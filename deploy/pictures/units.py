"""Values as text in the units that the dashboards use. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.dashboards.live import CannotCheck

from nouscoder.report.charts import format_number


@dataclass(frozen=True, slots=True)
class Scale:
    """How the values of one panel are written: divided by `divisor`, between `prefix` and `suffix`."""

    divisor: float
    prefix: str = ""
    suffix: str = ""

    def text(self, value: float) -> str:
        """At most three significant digits; whole numbers in full."""
        scaled = value / self.divisor
        whole = abs(scaled) < 1e7 and abs(scaled - round(scaled)) < 1e-9
        number = format_number(float(round(scaled)) if whole else float(f"{scaled:.3g}"))
        return f"{self.prefix}{number}{self.suffix}"


# From the smallest value on for which each is used.
_SCALES: dict[str, tuple[tuple[float, Scale], ...]] = {
    "none": ((0, Scale(1)),),
    "percentunit": ((0, Scale(0.01, suffix=" %")),),
    "currencyUSD": ((0, Scale(1, prefix="$")),),
    "s": (
        (0, Scale(1)),
        (1e-9, Scale(1e-6, suffix=" µs")),
        (1e-3, Scale(1e-3, suffix=" ms")),
        (1, Scale(1, suffix=" s")),
        (180, Scale(60, suffix=" min")),
        (7200, Scale(3600, suffix=" h")),
    ),
    "bytes": (
        (0, Scale(1, suffix=" B")),
        (1024, Scale(1024, suffix=" KiB")),
        (1024**2, Scale(1024**2, suffix=" MiB")),
        (1024**3, Scale(1024**3, suffix=" GiB")),
    ),
}


def scale_of(unit: str, largest: float) -> Scale:
    """The scale for values up to `largest` in one of Grafana's units. Raises CannotCheck for a unit not listed here."""
    if unit not in _SCALES:
        raise CannotCheck(f"deploy/pictures/units.py does not know the unit {unit!r}")
    return [scale for least, scale in _SCALES[unit] if abs(largest) >= least][-1]
