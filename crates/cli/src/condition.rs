//! The value of a condition, as reports print it.
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde::Serialize;

/// The value of a condition.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ConditionValue {
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The reason, in one word.
    pub reason: String,
    /// The reason, as a sentence.
    pub message: String,
}

impl ConditionValue {
    pub(crate) fn new(status: &str, reason: &str, message: &str) -> Self {
        Self { status: status.to_owned(), reason: reason.to_owned(), message: message.to_owned() }
    }

    pub(crate) fn of(condition: &Condition) -> Self {
        Self::new(&condition.status, &condition.reason, &condition.message)
    }
}
