//! Reads the cluster's version of Kubernetes, and reports the tests that are skipped on this
//! version.
use std::io::Write as _;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::Cluster;

/// Environment variable that contains the path of a file. A skipped test writes the reason to this
/// file.
pub const SKIP_FILE_ENV: &str = "CLEAVE_E2E_SKIP_FILE";

/// A minor version of Kubernetes, such as 1.36.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KubernetesVersion {
    major: u32,
    minor: u32,
}

impl KubernetesVersion {
    /// The first version with `MutatingAdmissionPolicy` in `admissionregistration.k8s.io/v1`.
    pub const MUTATING_POLICIES: Self = Self { major: 1, minor: 36 };

    /// Parses the API server's response to a request of `/version`.
    fn parse(answer: &Value) -> Result<Self> {
        let number = |field: &str| -> Result<u32> {
            let text = answer[field].as_str().with_context(|| format!("/version has no field {field}"))?;
            // Some providers of Kubernetes append a plus sign to the minor number.
            let digits = text.trim_end_matches('+');
            digits.parse().with_context(|| format!("the field {field} of /version is {text:?}"))
        };
        Ok(Self { major: number("major")?, minor: number("minor")? })
    }

    /// Returns whether the API server can add the placement gate with a `MutatingAdmissionPolicy`.
    pub fn has_mutating_policies(self) -> bool {
        self >= Self::MUTATING_POLICIES
    }
}

impl std::fmt::Display for KubernetesVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Cluster {
    /// Reads the API server's version of Kubernetes.
    pub fn version(&self) -> Result<KubernetesVersion> {
        KubernetesVersion::parse(&self.get("/version")?)
    }
}

/// Reports that the running test is skipped: prints the reason, and writes the reason to the file
/// that [`SKIP_FILE_ENV`] names. The test must return after this call.
pub fn report_skipped(reason: &str) -> Result<()> {
    // Write to stderr directly, because libtest captures the output of macros such as `eprintln!`.
    writeln!(std::io::stderr(), "skipped: {reason}")?;
    let Some(path) = std::env::var_os(SKIP_FILE_ENV) else { return Ok(()) };
    std::fs::write(&path, reason).with_context(|| format!("failed to write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn version(major: &str, minor: &str) -> Result<KubernetesVersion> {
        KubernetesVersion::parse(&json!({"major": major, "minor": minor, "gitVersion": "v9.9.9"}))
    }

    #[test]
    fn versions_are_parsed_and_compared_as_numbers() -> Result<()> {
        assert_eq!(version("1", "36")?, KubernetesVersion::MUTATING_POLICIES);
        assert_eq!(version("1", "34+")?.to_string(), "1.34");
        assert!(version("1", "9")? < version("1", "34")?);
        assert!(version("1", "99")? < version("2", "0")?);
        Ok(())
    }

    #[test]
    fn mutating_policies_are_available_from_kubernetes_1_36() -> Result<()> {
        for (minor, expected) in [("34", false), ("35", false), ("36", true), ("37", true)] {
            assert_eq!(version("1", minor)?.has_mutating_policies(), expected, "1.{minor}");
        }
        Ok(())
    }

    #[test]
    fn an_answer_without_a_version_is_an_error() {
        assert!(version("1", "").is_err());
        assert!(version("1", "x").is_err());
        assert!(KubernetesVersion::parse(&json!({})).is_err());
    }
}
