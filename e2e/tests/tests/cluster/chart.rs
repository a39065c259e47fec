//! Values of the chart that a test changes while all of Cleave runs.
use std::io::Write as _;

use anyhow::Result;
use cleave_e2e::{SYSTEM, run};
use serde_json::Value;

/// A value of the chart, until this goes: then it is again as it was.
pub(crate) struct Setting {
    path: &'static str,
    before: Value,
}

impl Setting {
    /// `path` is as `helm --set` has it, without lists. Returns when all of Cleave that is changed
    /// by it is ready again.
    pub(crate) fn of(path: &'static str, value: impl Into<Value>) -> Result<Self> {
        let values = run("helm", &["get", "values", "cleave", "-n", SYSTEM, "--all", "-o", "json"])?;
        let values: Value = serde_json::from_str(&values)?;
        let before = path.split('.').fold(&values, |values, key| &values[key]).clone();
        // Made first: a change that fails halfway is taken back too.
        let setting = Self { path, before };
        setting.set(&value.into())?;
        Ok(setting)
    }

    fn set(&self, value: &Value) -> Result<()> {
        let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/cleave");
        let set = format!("{}={value}", self.path);
        let how = ["--reuse-values", "--set-json", &set, "--wait", "--timeout", "3m"];
        run("helm", &[&["upgrade", "cleave", chart, "-n", SYSTEM][..], &how].concat()).map(drop)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = self.set(&self.before) {
            let _ = writeln!(std::io::stderr(), "{} is not {} again: {error:#}", self.path, self.before);
        }
    }
}
