//! The operator: read, validate, plan, apply, report.
