//! Shortens text from outside this project before it enters a status, an error or a log.

/// Maximum number of characters of shortened text.
const MAX_SHORTENED_CHARS: usize = 200;

/// Shortens `text` to its beginning, and adds an ellipsis if text was removed.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_SHORTENED_CHARS) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
