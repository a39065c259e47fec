//! The admission webhook, for API servers without mutating admission policies. [`webhook`] answers
//! reviews, and [`certificate`] keeps its certificate.
pub(crate) mod certificate;
pub mod webhook;
