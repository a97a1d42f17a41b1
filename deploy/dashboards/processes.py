"""The row about processes, the same on every dashboard: the CPU and memory that each uses."""

from __future__ import annotations

from deploy.dashboards.panels import RATE, SCOPE, Panel, Query


def process_row(*components: str) -> tuple[str, tuple[Panel, ...]]:
    """Panels of these components' pods, or of all pods of the release if none is named."""
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
                "Cores that each service process uses. Candidates run in separate processes, which are not counted.",
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
                "Resident memory of each service process, without candidates.",
                "bytes",
                (Query(f"{by} (process_resident_memory_bytes{{{scope}}})", legend),),
            ),
            Panel(
                "Versions",
                "Processes by version and commit. More than one during an upgrade.",
                "none",
                (
                    Query(
                        f"count by (version, revision) (nouscoder_build_info{{{scope}}})",
                        "{{version}} {{revision}}",
                    ),
                ),
            ),
            Panel(
                "Uptime",
                "Seconds since each service process started. A drop is a restart.",
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
