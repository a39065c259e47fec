//! Tests of preflight.
