//! Draws diagrams as SVG from text descriptions.
//!
//! A description has one statement per line. Boxes are on a grid of columns and rows.
//!
//! ```text
//! title A sentence for readers who cannot see the picture
//! group 0 1 2 2 Text at the top of a frame around columns 0 to 2 and rows 1 to 2
//! box NAME 0 1 Text | second line
//! arrow NAME -> NAME Text | second line
//! arrow NAME <-> NAME Text
//! ```
//!
//! The picture has a background, so that it is legible on light and dark pages.
use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail, ensure};

/// Width and height of a box.
const BOX_SIZE_PIXELS: (i32, i32) = (190, 54);
/// Horizontal and vertical gap between boxes.
const BOX_GAP_PIXELS: (i32, i32) = (140, 66);
/// Margin around the boxes.
const MARGIN_PIXELS: i32 = 40;
/// Maximum number of characters in a line of a box.
const MAX_BOX_TEXT_CHARS: usize = 27;
/// Maximum number of characters in a line of text next to an arrow.
const MAX_ARROW_TEXT_CHARS: usize = 22;
/// Distance between lines of text.
const LINE_HEIGHT_PIXELS: i32 = 15;

const SVG_STYLE: &str = "\
text { font: 13px system-ui, sans-serif; fill: #1b1f24; text-anchor: middle; }
.small { font-size: 11px; fill: #4a5460; }
.start { text-anchor: start; }
.page { fill: #ffffff; stroke: #c9d1d9; }
.group { fill: #f3f6f9; stroke: #c9d1d9; }
.box { fill: #e3eefb; stroke: #2f6fb5; }
.arrow { stroke: #4a5460; stroke-width: 1.4; fill: none; }
.head { fill: #4a5460; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #aab4bf; }
  .page { fill: #12161b; stroke: #3b444d; }
  .group { fill: #1a2027; stroke: #3b444d; }
  .box { fill: #17314f; stroke: #5b9bd9; }
  .arrow { stroke: #aab4bf; }
  .head { fill: #aab4bf; }
}
";

#[derive(Debug, Default)]
struct Diagram {
    title: String,
    groups: Vec<Group>,
    boxes: Vec<LabelledBox>,
    arrows: Vec<Arrow>,
}

#[derive(Debug)]
struct Group {
    from: (i32, i32),
    to: (i32, i32),
    text: String,
}

#[derive(Debug)]
struct LabelledBox {
    name: String,
    at: (i32, i32),
    text: Vec<String>,
}

#[derive(Debug)]
struct Arrow {
    from: (i32, i32),
    to: (i32, i32),
    is_bidirectional: bool,
    text: Vec<String>,
}

/// Returns the SVG of a description.
pub(crate) fn render_svg(description: &str) -> Result<String> {
    let mut diagram = Diagram::default();
    for (index, line) in description.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        diagram.add_statement(line).with_context(|| format!("line {}: {line}", index + 1))?;
    }
    ensure!(!diagram.title.is_empty(), "the diagram has no title");
    ensure!(!diagram.boxes.is_empty(), "the diagram has no box");
    Ok(diagram.to_svg())
}

impl Diagram {
    fn add_statement(&mut self, line: &str) -> Result<()> {
        let (word, rest) = line.split_once(' ').context("a statement has a word and a text")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |index: usize| -> Result<i32> {
            fields.get(index).context("a number is missing")?.parse().context("this is not a number")
        };
        let text = |skip: usize| fields.get(skip..).unwrap_or_default().join(" ");
        match word {
            "title" => self.title = rest.to_owned(),
            "group" => {
                let (from, to) = ((number(0)?, number(1)?), (number(2)?, number(3)?));
                self.groups.push(Group { from, to, text: text(4) });
            }
            "box" => {
                let name = fields.first().copied().unwrap_or_default().to_owned();
                ensure!(self.boxes.iter().all(|known| known.name != name), "{name} is defined twice");
                self.boxes.push(LabelledBox {
                    name,
                    at: (number(1)?, number(2)?),
                    text: split_lines(&text(3), MAX_BOX_TEXT_CHARS)?,
                });
            }
            "arrow" => {
                let is_bidirectional = match fields.get(1) {
                    Some(&"->") => false,
                    Some(&"<->") => true,
                    _ => bail!("an arrow is `NAME -> NAME` or `NAME <-> NAME`"),
                };
                let at = |index: usize| {
                    let name = fields.get(index).copied().unwrap_or_default();
                    let found = self.boxes.iter().find(|known| known.name == name);
                    found.map(|found| found.at).with_context(|| format!("there is no box {name}"))
                };
                let (from, to) = (at(0)?, at(2)?);
                ensure!(from.0 == to.0 || from.1 == to.1, "an arrow must connect boxes of one row or one column");
                self.arrows.push(Arrow {
                    from,
                    to,
                    is_bidirectional,
                    text: split_lines(&text(3), MAX_ARROW_TEXT_CHARS)?,
                });
            }
            _ => bail!("there is no statement {word}"),
        }
        Ok(())
    }

    fn to_svg(&self) -> String {
        let most = |of: fn(&LabelledBox) -> i32| self.boxes.iter().map(of).max().unwrap_or(0);
        let corner = upper_left_corner((most(|node| node.at.0), most(|node| node.at.1)));
        let (width, height) =
            (corner.0 + BOX_SIZE_PIXELS.0 + MARGIN_PIXELS, corner.1 + BOX_SIZE_PIXELS.1 + MARGIN_PIXELS);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\">\n<title>{}</title>\n<style>\n{SVG_STYLE}</style>\n<defs>\
             <marker id=\"head\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"8\" markerHeight=\"8\" \
             orient=\"auto-start-reverse\"><path class=\"head\" d=\"M0 0 L10 5 L0 10 z\"/></marker></defs>\n\
             <rect class=\"page\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\"/>\n",
            escape_xml(&self.title),
            width - 1,
            height - 1,
        );
        for Group { from, to, text } in &self.groups {
            let (left, top) = upper_left_corner(*from);
            let (right, bottom) = upper_left_corner(*to);
            let _ = writeln!(
                out,
                "<rect class=\"group\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"6\"/>\n\
                 <text class=\"small start\" x=\"{}\" y=\"{}\">{}</text>",
                left - 20,
                top - 26,
                right - left + BOX_SIZE_PIXELS.0 + 40,
                bottom - top + BOX_SIZE_PIXELS.1 + 46,
                left - 10,
                top - 11,
                escape_xml(text),
            );
        }
        for arrow in &self.arrows {
            arrow.write_svg(&mut out);
        }
        for LabelledBox { at, text, .. } in &self.boxes {
            let (x, y) = upper_left_corner(*at);
            let _ = writeln!(
                out,
                "<rect class=\"box\" x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"5\"/>",
                BOX_SIZE_PIXELS.0, BOX_SIZE_PIXELS.1
            );
            write_lines(&mut out, "", (x + BOX_SIZE_PIXELS.0 / 2, y + BOX_SIZE_PIXELS.1 / 2), text);
        }
        out.push_str("</svg>\n");
        out
    }
}

impl Arrow {
    fn write_svg(&self, out: &mut String) {
        let (from, to) = (upper_left_corner(self.from), upper_left_corner(self.to));
        let (middle_x, middle_y) = (BOX_SIZE_PIXELS.0 / 2, BOX_SIZE_PIXELS.1 / 2);
        let (start, end) = if self.from.1 == self.to.1 {
            let right = to.0 > from.0;
            let (out, into) = if right { (BOX_SIZE_PIXELS.0, 0) } else { (0, BOX_SIZE_PIXELS.0) };
            ((from.0 + out, from.1 + middle_y), (to.0 + into, to.1 + middle_y))
        } else {
            let down = to.1 > from.1;
            let (out, into) = if down { (BOX_SIZE_PIXELS.1, 0) } else { (0, BOX_SIZE_PIXELS.1) };
            ((from.0 + middle_x, from.1 + out), (to.0 + middle_x, to.1 + into))
        };
        let back = if self.is_bidirectional { " marker-start=\"url(#head)\"" } else { "" };
        let _ = writeln!(
            out,
            "<path class=\"arrow\" d=\"M{} {} L{} {}\" marker-end=\"url(#head)\"{back}/>",
            start.0, start.1, end.0, end.1
        );
        let middle = (i32::midpoint(start.0, end.0), i32::midpoint(start.1, end.1));
        let count = i32::try_from(self.text.len()).unwrap_or(0);
        if self.from.1 == self.to.1 {
            write_lines(out, "small", (middle.0, middle.1 - 6 - count * LINE_HEIGHT_PIXELS / 2), &self.text);
        } else {
            write_lines(out, "small start", (middle.0 + 10, middle.1), &self.text);
        }
    }
}

/// Returns the upper left corner of a box.
fn upper_left_corner((column, row): (i32, i32)) -> (i32, i32) {
    (
        MARGIN_PIXELS + column * (BOX_SIZE_PIXELS.0 + BOX_GAP_PIXELS.0),
        MARGIN_PIXELS + row * (BOX_SIZE_PIXELS.1 + BOX_GAP_PIXELS.1),
    )
}

/// Splits a text into lines at each `|`. Fails if a line has more than `max_chars` characters.
fn split_lines(text: &str, max_chars: usize) -> Result<Vec<String>> {
    let lines: Vec<String> =
        text.split('|').map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect();
    let long = lines.iter().find(|line| line.chars().count() > max_chars);
    if let Some(long) = long {
        bail!("{long:?} is longer than {max_chars} characters: break it with |");
    }
    Ok(lines)
}

/// Writes lines of text, vertically centred at a point. Without a class, lines after the first have
/// the class `small`.
fn write_lines(out: &mut String, class: &str, (x, y): (i32, i32), lines: &[String]) {
    let first = y - (i32::try_from(lines.len()).unwrap_or(1) - 1) * LINE_HEIGHT_PIXELS / 2 + 4;
    for (line, y) in lines.iter().zip((first..).step_by(usize::try_from(LINE_HEIGHT_PIXELS).unwrap_or(1))) {
        let class = if class.is_empty() && y != first { "small" } else { class };
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let _ = writeln!(out, "<text{class} x=\"{x}\" y=\"{y}\">{}</text>", escape_xml(line));
    }
}

fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_description_always_gives_the_same_drawing() -> Result<()> {
        let text = "title A <b>\ngroup 0 0 1 0 Frame\nbox a 0 0 One | two\nbox b 1 0 B\narrow a <-> b both ways\n";
        let drawn = render_svg(text)?;
        assert_eq!(drawn, render_svg(text)?);
        for part in ["<title>A &lt;b&gt;</title>", ">One</text>", "class=\"small\"", "marker-start", ">Frame</text>"] {
            assert!(drawn.contains(part), "{part}");
        }
        assert_eq!(drawn.matches("<rect class=\"box\"").count(), 2);
        Ok(())
    }

    #[test]
    fn an_invalid_description_is_an_error() {
        for text in [
            "title T",
            "box a 0 0 A",
            "title T\nbox a x 0 A",
            "title T\nbox a 0 0 A\nbox a 1 0 B",
            "title T\nbox a 0 0 A\nbox b 1 1 B\narrow a -> b diagonal",
            "title T\nbox a 0 0 A\narrow a -> c none",
            "title T\nbox a 0 0 A much longer text than any box can ever hold",
            "title T\ncircle a 0 0",
        ] {
            assert!(render_svg(text).is_err(), "{text}");
        }
    }
}
