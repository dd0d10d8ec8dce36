"""Writers with the methods of `clu.metric_writers.MetricWriter`, and the bridge to CLU's own."""
