//! Reads the documentation's pages, for the generator and for the cluster tests.
pub mod commands;
