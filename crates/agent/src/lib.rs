//! The node agent: observe, diff, act, report.
