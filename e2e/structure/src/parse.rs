//! Parses each file once.
use std::collections::BTreeMap;

use syn::punctuated::Punctuated;
use syn::{Attribute, File, Meta, Token};

use crate::model::Sources;

/// The reason why the sources cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file is not valid Rust.
    #[error("{path}:{line}: {message}")]
    Syntax {
        /// Path of the file.
        path: String,
        /// Line number, from 1.
        line: usize,
        /// The parser's message.
        message: String,
    },
    /// A `mod` declaration whose file does not exist.
    #[error("{path}:{line}: module `{name}` has no file")]
    NoFile {
        /// Path of the file that contains the declaration.
        path: String,
        /// Line number of the declaration. The first line is 1.
        line: usize,
        /// Name of the module.
        name: String,
    },
    /// The root file of a crate does not exist.
    #[error("{0}: no such file")]
    NoRoot(String),
}

/// Syntax trees of all Rust files, by path.
pub type Parsed = BTreeMap<String, File>;

/// Parses every Rust file of `sources`.
///
/// # Errors
/// Returns the position and message of the first syntax error.
pub fn parse(sources: &Sources) -> Result<Parsed, Error> {
    let file = |(path, text): (&String, &String)| match syn::parse_file(text) {
        Ok(file) => Ok((path.clone(), file)),
        Err(error) => {
            Err(Error::Syntax { path: path.clone(), line: error.span().start().line, message: error.to_string() })
        }
    };
    sources.files.iter().map(file).collect()
}

/// Returns whether one of an item's attributes limits the item to test builds.
pub(crate) fn is_only_in_test_builds(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg") && attribute.parse_args().is_ok_and(|meta| needs_test(&meta)))
    })
}

/// Returns whether a `cfg` predicate is true only in test builds.
fn needs_test(predicate: &Meta) -> bool {
    let Meta::List(list) = predicate else { return predicate.path().is_ident("test") };
    let Ok(inner) = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated) else { return false };
    if list.path.is_ident("all") {
        inner.iter().any(needs_test)
    } else {
        list.path.is_ident("any") && !inner.is_empty() && inner.iter().all(needs_test)
    }
}
