//! The admission webhook, for API servers without the policies that gate pods: [`webhook`] answers
//! reviews, [`certificate`] keeps the certificate it serves with.
pub(crate) mod certificate;
pub mod webhook;
