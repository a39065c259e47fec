//! The admission webhook, for API servers without mutating admission policies. [`webhook`] answers
//! reviews, and [`certificate`] manages its certificate.
pub(crate) mod certificate;
pub mod webhook;
