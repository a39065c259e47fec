//! Shortens text from outside this project before it enters a status, an error or a log.

/// The longest part that is kept, in characters.
const MAX_CHARS: usize = 200;

/// The beginning of `text`, with an ellipsis where something was cut off.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
