//! Changes values of the chart while Cleave runs.
use std::io::Write as _;

use anyhow::Result;
use cleave_e2e::{SYSTEM_NAMESPACE, run_program};
use serde_json::Value;

/// A changed chart value. Dropping this setting restores the earlier value.
pub(crate) struct ChartSetting {
    earlier_values: Vec<(&'static str, Value)>,
}

impl ChartSetting {
    /// Changes a value. `path` is a path of `helm --set`, without lists. Waits until the chart's
    /// release is ready.
    pub(crate) fn change(path: &'static str, value: impl Into<Value>) -> Result<Self> {
        let mut setting = Self { earlier_values: Vec::new() };
        setting.change_also(&[(path, value.into())])?;
        Ok(setting)
    }

    /// Changes additional values in one upgrade. Dropping the setting restores all of its values in
    /// one upgrade.
    pub(crate) fn change_also(&mut self, changes: &[(&'static str, Value)]) -> Result<()> {
        let values = run_program("helm", &["get", "values", "cleave", "-n", SYSTEM_NAMESPACE, "--all", "-o", "json"])?;
        let values: Value = serde_json::from_str(&values)?;
        // Record the earlier values first, so that dropping the setting also reverts an upgrade
        // that fails after it has changed objects.
        for (path, _) in changes {
            if self.earlier_values.iter().all(|(known, _)| known != path) {
                let value = path.split('.').fold(&values, |values, key| &values[key]).clone();
                self.earlier_values.push((*path, value));
            }
        }
        upgrade(changes)
    }
}

/// Upgrades the chart's release with these values, and waits until the release is ready.
fn upgrade(values: &[(&'static str, Value)]) -> Result<()> {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/cleave");
    let set: Vec<String> = values.iter().map(|(path, value)| format!("--set-json={path}={value}")).collect();
    let mut arguments = vec!["upgrade", "cleave", chart, "-n", SYSTEM_NAMESPACE];
    arguments.extend(["--reuse-values", "--wait", "--timeout", "3m"]);
    arguments.extend(set.iter().map(String::as_str));
    run_program("helm", &arguments).map(drop)
}

impl Drop for ChartSetting {
    fn drop(&mut self) {
        if let Err(error) = upgrade(&self.earlier_values) {
            let _ = writeln!(std::io::stderr(), "failed to restore {:?}: {error:#}", self.earlier_values);
        }
    }
}
