"""What every dashboard is made of: its variables, queries and panels, each with unit, legend and description.

Ratios are taken of sums, so that a panel is right for one container and for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TypeVar

from grafana_foundation_sdk.builders.barchart import Panel as BarChart
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    FieldColor,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.heatmap import HeatmapColorOptions, YAxisConfig
from grafana_foundation_sdk.builders.heatmap import Panel as Heatmap
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.statetimeline import Panel as StateTimeline
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Panel = TimeSeries | Stat | BarChart | Heatmap | StateTimeline | Table
P = TypeVar("P", TimeSeries, Stat, BarChart, Heatmap, StateTimeline, Table)

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SERVER = 'job=~"$job"'
"""Selects the series that a server has once."""
ENGINE = f'{SERVER}, model_name=~"$model_name", engine=~"$engine"'
"""Selects the series that every engine has."""

TOKENS, TOKENS_PER_SECOND, PER_SECOND = "suffix: tokens", "suffix: tokens/s", "suffix: /s"
SHARE, SECONDS, NUMBER = "percentunit", "s", "short"

GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "text"


def rate(series: str, selector: str = ENGINE) -> str:
    """A counter's rate over a range that suits the panel's width."""
    return f"rate({series}{{{selector}}}[$__rate_interval])"


def mean(histogram: str, by: str = "") -> str:
    """The mean of a histogram's observations."""
    return f"sum{by} ({rate(histogram + '_sum')}) / (sum{by} ({rate(histogram + '_count')}) > 0)"


def quantile(share: float, histogram: str) -> str:
    """A quantile over all the selected engines together."""
    return f"histogram_quantile({share}, sum by (le) ({rate(histogram + '_bucket')}))"


def query(expression: str, legend: str) -> Dataquery:
    """A query over the dashboard's time range."""
    return Dataquery().expr(expression).legend_format(legend).datasource(SOURCE).range()


def latest(expression: str, legend: str = "") -> Dataquery:
    """The newest value only, as rows of a table."""
    return (
        Dataquery()
        .expr(expression)
        .legend_format(legend or "__auto")
        .datasource(SOURCE)
        .instant()
        .format(PromQueryFormat.TABLE)
    )


def thresholds(*steps: tuple[float | None, str]) -> ThresholdsConfig:
    """Colours from a value on; the first step has none."""
    return (
        ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=color) for value, color in steps])
    )


def lines(title: str, description: str, unit: str, *queries: Dataquery, span: int = 12) -> TimeSeries:
    """Values over time, with their last and mean in the legend."""
    panel = (
        TimeSeries()
        .title(title)
        .description(description)
        .unit(unit)
        .span(span)
        .height(8)
        .line_width(1)
        .fill_opacity(8)
        .show_points(VisibilityMode.NEVER)
        .color_scheme(FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
        .thresholds(thresholds((None, GREEN)))
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .legend(
            VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "mean"])
        )
    )
    return _with_queries(panel, queries)


def areas(title: str, description: str, unit: str, *queries: Dataquery, span: int = 12) -> TimeSeries:
    """Parts of a whole over time."""
    panel = lines(title, description, unit, *queries, span=span)
    return panel.fill_opacity(40).stacking(StackingConfig().mode(StackingMode.NORMAL).group("A"))


def number(
    title: str, description: str, unit: str, steps: ThresholdsConfig, *queries: Dataquery, span: int = 4
) -> Stat:
    """The newest value, large, over its course."""
    panel = (
        Stat()
        .title(title)
        .description(description)
        .unit(unit)
        .span(span)
        .height(4)
        .no_value("none")
        .thresholds(steps)
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.AREA)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    )
    return _with_queries(panel, queries)


def bars(
    title: str, description: str, unit: str, x: str, columns: Sequence[tuple[str, str]], span: int = 12
) -> BarChart:
    """Newest values side by side.

    Args:
        title: The panel's title.
        description: What it shows.
        unit: The values' unit.
        x: The label that the bars stand over.
        columns: (legend, expression) of each set of bars; every expression yields one value a label `x`.
        span: Width, of 24.
    """
    letters = [chr(ord("A") + i) for i in range(len(columns))]
    panel = (
        BarChart()
        .title(title)
        .description(description)
        .unit(unit)
        .span(span)
        .height(8)
        .x_field(x)
        .min(0)
        .color_scheme(FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
        .thresholds(thresholds((None, GREEN)))
        .legend(
            VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .calcs([])
        )
        .with_transformation(DataTransformerConfig("joinByField", {"byField": x, "mode": "outer"}))
        .with_transformation(DataTransformerConfig("filterFieldsByName", {"include": {"pattern": f"^({x}|Value.*)$"}}))
        .with_transformation(DataTransformerConfig("sortBy", {"fields": {}, "sort": [{"field": x}]}))
    )
    for letter, (legend, _) in zip(letters, columns, strict=True):
        field = "Value" if len(columns) == 1 else f"Value #{letter}"
        panel.override_by_name(field, [DynamicConfigValue("displayName", legend)])
    return _with_queries(panel, [latest(expression, legend) for legend, expression in columns])


def heat(title: str, description: str, unit: str, histogram: str, span: int = 12) -> Heatmap:
    """How a histogram's observations are spread, over time."""
    spread = query(f"sum by (le) ({rate(histogram + '_bucket')})", "{{le}}").format(PromQueryFormat.HEATMAP)
    panel = (
        Heatmap()
        .title(title)
        .description(description)
        .span(span)
        .height(8)
        .calculate(False)
        .color(HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64))
        .y_axis(YAxisConfig().unit(unit))
        .unit(PER_SECOND)
        .show_legend()
        .thresholds(thresholds((None, GREEN)))
    )
    return _with_queries(panel, [spread])


def timeline(
    title: str, description: str, texts: Sequence[tuple[str, str]], *queries: Dataquery, span: int = 12
) -> StateTimeline:
    """Which of several texts holds, over time; the queries' values are positions in `texts`, from 1 on."""
    results = {
        str(position): ValueMappingResult(text=text, color=color, index=position)
        for position, (text, color) in enumerate(texts, 1)
    }
    panel = (
        StateTimeline()
        .title(title)
        .description(description)
        .unit(NUMBER)
        .span(span)
        .height(8)
        .show_value(VisibilityMode.AUTO)
        .merge_values(True)
        .mappings([ValueMap(options=results)])
        .thresholds(thresholds((None, GREY)))
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
    )
    return _with_queries(panel, queries)


def table(title: str, description: str, labels: Sequence[str], expression: str, span: int = 12) -> Table:
    """The labels of series, one row a series."""
    hidden = {"Time": True, "Value": True}
    panel = (
        Table()
        .title(title)
        .description(description)
        .unit(NUMBER)
        .span(span)
        .height(8)
        .thresholds(thresholds((None, GREY)))
        .with_transformation(
            DataTransformerConfig(
                "organize",
                {"excludeByName": hidden, "indexByName": {label: i for i, label in enumerate(labels)}},
            )
        )
    )
    return _with_queries(panel, [latest(f"sum by ({', '.join(labels)}) ({expression})")])


def dashboard(uid: str, title: str, description: str, *rows: tuple[str, Sequence[Panel]]) -> Dashboard:
    """A dashboard of titled rows, with the variables and links that all of them have."""
    built = (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["dspark-serve"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .link(
            DashboardLink("dspark-serve")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["dspark-serve"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            DatasourceVariable("datasource").label("Data source").type("prometheus").description("A Prometheus")
        )
        .with_variable(_choice("job", "Job", "Scrape jobs", "label_values(dspark_build_info, job)"))
        .with_variable(
            _choice(
                "model_name",
                "Model",
                "Served models",
                f"label_values(vllm:num_requests_running{{{SERVER}}}, model_name)",
            )
        )
        .with_variable(
            _choice(
                "engine",
                "Engine",
                "Data-parallel ranks",
                f'label_values(vllm:num_requests_running{{{SERVER}, model_name=~"$model_name"}}, engine)',
            )
        )
    )
    ids = count(1)
    for heading, panels in rows:
        built.with_row(Row(heading).id(next(ids)))
        for panel in panels:
            built.with_panel(panel.id(next(ids)))
    return built


def _choice(name: str, label: str, description: str, values: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(SOURCE)
        .query(values)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _with_queries(panel: P, queries: Sequence[Dataquery]) -> P:
    """The panel with its data source and queries, which Grafana knows by letters."""
    panel.datasource(SOURCE)
    for position, each in enumerate(queries):
        panel.with_target(each.ref_id(chr(ord("A") + position)))
    return panel
