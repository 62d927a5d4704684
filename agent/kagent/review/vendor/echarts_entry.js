import * as core from "echarts/core";
import { BarChart, CustomChart, LineChart, ScatterChart, TreeChart } from "echarts/charts";
import {
  AriaComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent,
} from "echarts/components";
import { SVGRenderer } from "echarts/renderers";

core.use([
  BarChart, CustomChart, LineChart, ScatterChart, TreeChart,
  AriaComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent,
  SVGRenderer,
]);
globalThis.echarts = core;
