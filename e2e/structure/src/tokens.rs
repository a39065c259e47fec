//! Finds paths in tokens that are not parsed: the arguments of macros and attributes.
use proc_macro2::{TokenStream, TokenTree};

/// A path, and the line on which it starts.
pub(crate) type PathAtLine = (Vec<String>, usize);

/// Returns every path of two or more segments in `tokens`, and every single name that starts with
/// an upper-case letter, because types have such names.
pub(crate) fn mentioned_paths(tokens: TokenStream) -> Vec<PathAtLine> {
    let mut found = Vec::new();
    collect_paths(tokens, &mut found);
    found
}

/// Returns the paths in string literals that start with `crate`, `self` or `super`, such as
/// `"crate::quantity::zero"` in serde's attribute `default = "crate::quantity::zero"`.
pub(crate) fn quoted_paths(tokens: TokenStream) -> Vec<PathAtLine> {
    let mut found = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Group(group) => found.extend(quoted_paths(group.stream())),
            TokenTree::Literal(literal) => {
                let text = literal.to_string();
                let path: Vec<String> = text.trim_matches('"').split("::").map(str::to_owned).collect();
                if path.len() > 1 && matches!(path[0].as_str(), "crate" | "self" | "super") {
                    found.push((path, literal.span().start().line));
                }
            }
            TokenTree::Ident(_) | TokenTree::Punct(_) => {}
        }
    }
    found
}

fn collect_paths(tokens: TokenStream, found: &mut Vec<PathAtLine>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        at += 1;
        match token {
            TokenTree::Group(group) => collect_paths(group.stream(), found),
            TokenTree::Ident(first) => {
                let begins = !is_continuation(&tokens[..at - 1]);
                let mut path = vec![first.to_string()];
                while let Some(TokenTree::Ident(next)) = tokens.get(at + 2).filter(|_| is_separator(&tokens, at)) {
                    path.push(next.to_string());
                    at += 3;
                }
                if begins && (path.len() > 1 || path[0].starts_with(char::is_uppercase)) {
                    found.push((path, first.span().start().line));
                }
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Returns whether the name after `before` belongs to another name, as in `.field` and `::name`.
fn is_continuation(before: &[TokenTree]) -> bool {
    let punct = |token: &TokenTree, of: char| matches!(token, TokenTree::Punct(punct) if punct.as_char() == of);
    match before {
        [.., first, last] if punct(first, ':') && punct(last, ':') => true,
        // In `..Type`, the name starts a new path: the dots mean a range or the remaining fields of
        // a struct.
        [.., first, last] if punct(last, '.') => !punct(first, '.'),
        _ => false,
    }
}

fn is_separator(tokens: &[TokenTree], at: usize) -> bool {
    let colon = |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    colon(tokens.get(at)) && colon(tokens.get(at + 1))
}
