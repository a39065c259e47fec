//! Wraps Markdown text.

/// Maximum number of columns of a line of Markdown.
pub(crate) const MAX_LINE_COLUMNS: usize = 100;

/// Wraps a paragraph. The first line starts with `first`, and every other line with `rest`. Code
/// spans are not broken.
pub(crate) fn wrap(text: &str, first: &str, rest: &str) -> String {
    let mut lines = Vec::new();
    let mut line = first.to_owned();
    let mut empty = true;
    for word in split_words(text) {
        let width = line.chars().count() + usize::from(!empty) + word.chars().count();
        if !empty && width > MAX_LINE_COLUMNS {
            lines.push(std::mem::replace(&mut line, rest.to_owned()));
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(&word);
        empty = false;
    }
    lines.push(line);
    lines.join("\n") + "\n"
}

/// Returns a wrapped list item.
pub(crate) fn wrap_list_item(text: &str) -> String {
    wrap(text, "- ", "  ")
}

/// Returns the words of a text. A code span is part of one word.
fn split_words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut in_code = false;
    let mut open = false;
    for character in text.chars() {
        if character == '`' {
            in_code = !in_code;
        }
        if character.is_whitespace() && !in_code {
            open = false;
        } else if let Some(word) = words.last_mut().filter(|_| open) {
            word.push(character);
        } else {
            words.push(character.to_string());
            open = true;
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_wrapped_with_an_indentation() {
        let text = "word ".repeat(40);
        let wrapped = wrap_list_item(&text);
        assert!(wrapped.lines().all(|line| line.len() <= MAX_LINE_COLUMNS), "{wrapped}");
        assert!(wrapped.starts_with("- word ") && wrapped.contains("\n  word "), "{wrapped}");
    }

    #[test]
    fn a_code_span_stays_on_one_line() {
        let text = format!("{}`a b c` end", "x".repeat(MAX_LINE_COLUMNS - 4) + " ");
        assert!(wrap(&text, "", "").contains("\n`a b c` end"));
    }
}
