//! Helpers that change chart values while Cleave runs.
use std::io::Write as _;

use anyhow::Result;
use cleave_e2e::{SYSTEM_NAMESPACE, run_program};
use serde_json::Value;

/// A changed chart value. Dropping it restores the earlier value.
pub(crate) struct Setting {
    path: &'static str,
    before: Value,
}

impl Setting {
    /// Changes a value. `path` is a path of `helm --set`, without lists. Returns when all changed
    /// objects are ready.
    pub(crate) fn change(path: &'static str, value: impl Into<Value>) -> Result<Self> {
        let values = run_program("helm", &["get", "values", "cleave", "-n", SYSTEM_NAMESPACE, "--all", "-o", "json"])?;
        let values: Value = serde_json::from_str(&values)?;
        let before = path.split('.').fold(&values, |values, key| &values[key]).clone();
        // Construct the value first, so that dropping it also undoes a change that fails halfway.
        let setting = Self { path, before };
        setting.set(&value.into())?;
        Ok(setting)
    }

    /// Upgrades the release with this value, and waits until the release is ready.
    fn set(&self, value: &Value) -> Result<()> {
        let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/cleave");
        let set = format!("{}={value}", self.path);
        let how = ["--reuse-values", "--set-json", &set, "--wait", "--timeout", "3m"];
        run_program("helm", &[&["upgrade", "cleave", chart, "-n", SYSTEM_NAMESPACE][..], &how].concat()).map(drop)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = self.set(&self.before) {
            let _ = writeln!(std::io::stderr(), "failed to restore {} to {}: {error:#}", self.path, self.before);
        }
    }
}
