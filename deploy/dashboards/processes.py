"""The row about processes, the same on every dashboard: what each uses of the machine."""

from __future__ import annotations

from deploy.dashboards.panels import RATE, SCOPE, Panel, Query


def process_row(*components: str) -> tuple[str, tuple[Panel, ...]]:
    """Panels of these components' pods; all of the release when none is named."""
    scope = SCOPE
    if components:
        scope += f',app_kubernetes_io_component=~"{"|".join(components)}"'
    by = "sum by (app_kubernetes_io_component, pod)"
    legend = "{{app_kubernetes_io_component}} {{pod}}"
    return (
        "Processes",
        (
            Panel(
                "CPU",
                "Cores that each service process uses itself. Candidates run in processes of their own, not counted.",
                "none",
                (
                    Query(
                        f"{by} (rate(process_cpu_seconds_total{{{scope}}}[{RATE}]))",
                        legend,
                    ),
                ),
            ),
            Panel(
                "Memory",
                "Resident memory of each service process, candidates not counted.",
                "bytes",
                (Query(f"{by} (process_resident_memory_bytes{{{scope}}})", legend),),
            ),
            Panel(
                "Up since",
                "How long each service process has run: a drop is a restart.",
                "s",
                (
                    Query(
                        f"time() - max by (app_kubernetes_io_component, pod) (process_start_time_seconds{{{scope}}})",
                        legend,
                    ),
                ),
            ),
        ),
    )
