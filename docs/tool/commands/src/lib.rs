//! Parses the command blocks on tutorial and how-to pages, and the comments that specify how each
//! block is tested.
//!
//! A comment directly above a fenced `sh`, `bash` or `console` block specifies how it is tested:
//!
//! | comment | meaning |
//! |---|---|
//! | `<!-- run -->` | a cluster test runs the block |
//! | `<!-- run: NODE=node1 GPU=3 -->` | the same, with each word `NODE` and `GPU` replaced |
//! | `<!-- retry: … -->` | the same, repeated until it succeeds and the output is as shown |
//! | `<!-- not run: reason -->` | no test runs the block, for the given reason |
//!
//! A fenced block below `<!-- output -->` shows lines that the previous command block prints.
//! Numbers, ages and generated names may differ. Below `<!-- exact output -->`, only white space
//! may differ.

/// Placeholders that a reader replaces. For a block that a test runs, the comment must give the
/// values of its placeholders.
const PLACEHOLDERS: [&str; 7] = ["NODE", "GPU", "NAMESPACE", "NAME", "POD", "POLICY", "REGISTRY"];
/// Minimum number of words in the reason of a `not run` comment. Shorter reasons explain nothing.
const MIN_REASON_WORDS: usize = 3;

/// A command block on a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeBlock {
    /// Line of the opening fence, counted from 1.
    pub line: usize,
    /// The commands as the page shows them, without the indentation of the fence.
    pub text: String,
    /// How the block is tested.
    pub test: BlockTest,
    /// The output that the page shows for the block.
    pub output: Option<ShownOutput>,
}

/// How a block is tested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockTest {
    /// A cluster test runs the block.
    Run {
        /// Words to replace, and their values.
        values: Vec<(String, String)>,
        /// Whether the test repeats the block until it succeeds and the output is as shown.
        retry: bool,
    },
    /// No test runs the block.
    NotRun {
        /// The reason why no test runs the block.
        reason: String,
    },
}

/// The output that a page shows for a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShownOutput {
    /// The lines, in any order. A line of dots stands for lines that the page does not show.
    pub text: String,
    /// Whether numbers, ages and generated names must also be equal.
    pub exact: bool,
}

impl CodeBlock {
    /// Returns the commands to run, with the words of [`BlockTest::Run`] replaced. Returns an empty
    /// string if no test runs the block.
    pub fn script(&self) -> String {
        let BlockTest::Run { values, .. } = &self.test else { return String::new() };
        values.iter().fold(self.text.clone(), |text, (word, value)| replace_word(&text, word, value))
    }
}

impl ShownOutput {
    /// Returns the shown lines that `printed` does not contain.
    pub fn missing_lines(&self, printed: &str) -> Vec<String> {
        let form = |line: &str| if self.exact { collapse_white_space(line) } else { mask_variable_parts(line) };
        let printed: Vec<String> = printed.lines().map(form).collect();
        let shown = self.text.lines().filter(|line| !matches!(line.trim(), "" | "..." | "…"));
        shown.filter(|line| !printed.contains(&form(line))).map(str::to_owned).collect()
    }
}

/// Returns the command blocks on a page in order, and the problems of their comments. Each problem
/// starts with a line number.
pub fn parse_blocks(page: &str) -> (Vec<CodeBlock>, Vec<String>) {
    let mut blocks: Vec<CodeBlock> = Vec::new();
    let mut problems = Vec::new();
    // The comment directly above the current line.
    let mut comment: Option<&str> = None;
    let mut lines = page.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let content = line.trim_start();
        let Some(language) = content.strip_prefix("```") else {
            comment = content.strip_prefix("<!--").and_then(|rest| rest.strip_suffix("-->")).map(str::trim);
            continue;
        };
        let indent = line.len() - content.len();
        let fenced = lines.by_ref().map(|(_, line)| line).take_while(|line| line.trim() != "```");
        let text: String = fenced.map(|line| format!("{}\n", line.get(indent..).unwrap_or_default())).collect();
        let above = comment.take();
        if let Some(exact) = above.and_then(parse_output_comment) {
            match blocks.last_mut() {
                Some(CodeBlock { output: output @ None, test: BlockTest::Run { .. }, .. }) => {
                    *output = Some(ShownOutput { text, exact });
                }
                _ => problems.push(format!("{}: this output follows no block that is run", index + 1)),
            }
        } else if matches!(language.trim(), "sh" | "bash" | "console") {
            match above
                .ok_or_else(|| "this block has no comment `run` or `not run: reason` above it".to_owned())
                .and_then(parse_test)
            {
                Ok(test) => {
                    let block = CodeBlock { line: index + 1, text, test, output: None };
                    problems.extend(
                        remaining_placeholders(&block).map(|word| format!("{}: {word} has no value", block.line)),
                    );
                    blocks.push(block);
                }
                Err(problem) => problems.push(format!("{}: {problem}", index + 1)),
            }
        }
    }
    (blocks, problems)
}

/// Parses a comment above output, and returns whether the output must be exact. Returns `None` if
/// the comment is not about output.
fn parse_output_comment(comment: &str) -> Option<bool> {
    match comment {
        "output" => Some(false),
        "exact output" => Some(true),
        _ => None,
    }
}

/// Parses the comment above a command block.
fn parse_test(comment: &str) -> Result<BlockTest, String> {
    let (word, rest) = comment.split_once(':').unwrap_or((comment, ""));
    match word.trim() {
        "not run" if rest.split_whitespace().count() >= MIN_REASON_WORDS => {
            Ok(BlockTest::NotRun { reason: rest.trim().to_owned() })
        }
        "not run" => Err("the comment above this block does not give the reason why no test runs the block".to_owned()),
        word @ ("run" | "retry") => {
            let pairs = rest.split_whitespace().map(|pair| match pair.split_once('=') {
                Some((name, value)) if !name.is_empty() && !value.is_empty() => Ok((name.to_owned(), value.to_owned())),
                _ => Err(format!("{pair} in the comment above this block is not WORD=value")),
            });
            Ok(BlockTest::Run { values: pairs.collect::<Result<_, _>>()?, retry: word == "retry" })
        }
        _ => Err(format!("the comment above this block is neither `run` nor `not run: reason`: {comment}")),
    }
}

/// Returns the placeholders that remain in a block that a test runs.
fn remaining_placeholders(block: &CodeBlock) -> impl Iterator<Item = &'static str> {
    let script = block.script();
    PLACEHOLDERS.into_iter().filter(move |word| replace_word(&script, word, "") != script)
}

fn is_part_of_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-')
}

/// Replaces each occurrence of a word that is not part of a longer word.
fn replace_word(text: &str, word: &str, value: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, from) = rest.split_at(at);
        let after = from.get(word.len()..).unwrap_or_default();
        let alone = !before.ends_with(is_part_of_word) && !after.starts_with(is_part_of_word);
        out.push_str(before);
        out.push_str(if alone { value } else { word });
        rest = after;
        // Also skip the next character: an occurrence that starts there is part of the same longer
        // word.
        if !alone && let Some(next) = rest.chars().next().filter(|next| is_part_of_word(*next)) {
            out.push(next);
            rest = rest.get(next.len_utf8()..).unwrap_or_default();
        }
    }
    out.push_str(rest);
    out
}

fn collapse_white_space(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Replaces numbers, ages, the UUIDs of GPUs and MIG devices, and the random suffixes of generated
/// names with fixed text.
fn mask_variable_parts(line: &str) -> String {
    line.split_whitespace().map(mask_variable_part).collect::<Vec<_>>().join(" ")
}

fn mask_variable_part(word: &str) -> String {
    if word.starts_with("GPU-") || word.starts_with("MIG-") {
        return "UUID".to_owned();
    }
    if word.starts_with(|c: char| c.is_ascii_digit()) && word.chars().all(|c| c.is_ascii_digit() || "dhms".contains(c))
    {
        return "#".to_owned();
    }
    let word = mask_random_suffix(word);
    let mut out = String::new();
    for character in word.chars() {
        match character {
            '0'..='9' if out.ends_with('#') => {}
            '0'..='9' => out.push('#'),
            other => out.push(other),
        }
    }
    // Treat a decimal number as one number.
    out.replace("#.#", "#")
}

/// Replaces the random suffix of a pod name: `big-7d9c5b8f6d-4xkzq` becomes `big-RANDOM`.
fn mask_random_suffix(word: &str) -> String {
    let random = |part: &str, lengths: std::ops::RangeInclusive<usize>| {
        lengths.contains(&part.len())
            && part.chars().all(|c| c.is_ascii_digit() || c.is_ascii_lowercase() && !"aeiou".contains(c))
    };
    // Random suffixes of Kubernetes contain no vowels, but a template hash may contain vowels.
    let hash = |part: &str| {
        (8..=10).contains(&part.len()) && part.chars().all(|c| c.is_ascii_digit() || c.is_ascii_lowercase())
    };
    let mut parts = word.rsplitn(3, '-');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(pod), Some(set), Some(name)) if random(pod, 5..=5) && hash(set) => format!("{name}-RANDOM"),
        _ => word.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single_block(page: &str) -> CodeBlock {
        let (mut blocks, problems) = parse_blocks(page);
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(blocks.len(), 1);
        blocks.remove(0)
    }

    fn comment_problems(page: &str) -> Vec<String> {
        parse_blocks(page).1
    }

    #[test]
    fn a_block_without_a_comment_is_a_problem() {
        for comment in
            ["", "Text.\n", "<!-- run -->\n\n", "<!-- not run -->\n", "<!-- not run: no -->\n", "<!-- later -->\n"]
        {
            let page = format!("{comment}```sh\ncleave status\n```\n");
            assert_eq!(comment_problems(&page).len(), 1, "{page}");
        }
    }

    #[test]
    fn blocks_of_other_languages_need_no_comment() {
        assert_eq!(parse_blocks("```yaml\na: b\n```\n```\nprinted\n```\n"), (Vec::new(), Vec::new()));
    }

    #[test]
    fn a_block_that_is_not_run_has_its_reason() {
        let block = single_block("<!-- not run: it needs a registry -->\n```sh\npodman push\n```\n");
        assert_eq!(block.test, BlockTest::NotRun { reason: "it needs a registry".to_owned() });
        assert_eq!(block.script(), "");
    }

    #[test]
    fn a_word_is_replaced_unless_it_is_part_of_a_longer_word() {
        let block = single_block(
            "<!-- run: NODE=node1 GPU=3 -->\n```sh\ncleave drain NODE GPU --reason GPU-NODE\nGPUS=NODE/GPU\n```\n",
        );
        assert_eq!(block.script(), "cleave drain node1 3 --reason GPU-NODE\nGPUS=node1/3\n");
    }

    #[test]
    fn a_placeholder_without_a_value_is_a_problem() {
        assert_eq!(
            comment_problems("<!-- run: GPU=3 -->\n```sh\ncleave drain NODE GPU\n```\n"),
            ["2: NODE has no value"]
        );
        assert_eq!(comment_problems("<!-- run: GPU -->\n```sh\ncleave drain GPU\n```\n").len(), 1);
    }

    #[test]
    fn an_indented_block_loses_its_indentation() {
        let block = single_block("1. Text:\n\n   <!-- run -->\n   ```sh\n   kubectl get pods |\n     wc\n   ```\n");
        assert_eq!((block.script().as_str(), block.line), ("kubectl get pods |\n  wc\n", 4));
    }

    #[test]
    fn output_belongs_to_the_block_before_it() {
        let page = "<!-- retry -->\n```sh\nls\n```\n\nIt prints:\n\n<!-- exact output -->\n```\na\n```\n";
        let block = single_block(page);
        assert_eq!(block.output, Some(ShownOutput { text: "a\n".to_owned(), exact: true }));
        assert_eq!(block.test, BlockTest::Run { values: Vec::new(), retry: true });
        assert_eq!(comment_problems("<!-- output -->\n```\na\n```\n").len(), 1);
    }

    #[test]
    fn numbers_ages_and_generated_names_may_differ() {
        let shown = |text: &str, exact| ShownOutput { text: text.to_owned(), exact };
        let pods = "NAME  READY  AGE\nbig-7d9c5b8f6d-4xkzq   1/1   Running   3m2s\n";
        let printed = "NAME READY AGE\nbig-5bd6d8ffd8-zz9xw 1/1 Running 12s\nbig-5bd6d8ffd8-abcde 0/1 Pending 1s";
        assert_eq!(shown(pods, false).missing_lines(printed), Vec::<String>::new());
        assert_eq!(shown("big-7d9c5b8f6d-4xkzq 1/1 Failed 1s\n...\n", false).missing_lines(printed).len(), 1);
        assert_eq!(shown("a  1.5 GPU-1f", false).missing_lines("a 22 GPU-ab"), Vec::<String>::new());
        assert_eq!(shown("{\"sms\":38}", true).missing_lines("  {\"sms\":38}"), Vec::<String>::new());
        assert_eq!(shown("{\"sms\":38}", true).missing_lines("{\"sms\":36}").len(), 1);
    }
}
