//! Mutates samples at random: as bytes, or as JSON documents.
use fastrand::Rng;
use serde_json::{Map, Value};

/// Maximum length of an input, in bytes.
pub const MAX_INPUT_BYTES: usize = 64 << 10;

/// Format of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputShape {
    /// Bytes or text.
    Bytes,
    /// One JSON document.
    Json,
}

/// Numbers that are at or near the limits of types and formats.
const NUMBERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "2",
    "7",
    "8",
    "48",
    "49",
    "63",
    "64",
    "100",
    "101",
    "127",
    "128",
    "255",
    "256",
    "1000",
    "1024",
    "1025",
    "32767",
    "65535",
    "65536",
    "2147483647",
    "2147483648",
    "-2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "0.5",
    "-0.0",
    "1e3",
    "1e18",
    "1e308",
    "5e-324",
];

/// Large numbers that make sums and products overflow.
const LARGEST_NUMBERS: &[&str] =
    &["4294967295", "9223372036854775807", "18446744073709551615", "9223372036854775806", "1e308"];

/// Strings with a special meaning in many formats.
const SPECIAL_TEXTS: &[&str] = &[
    "", " ", "\0", "\n", ",", "=", ":", "::", "/", "../", ".", "-", "_", "+", "%", "\"", "\\", "{}", "[]", "[[[[[[[[",
    "\u{fffd}", "\u{202e}", "ä", "🦀", "NaN", "inf", "null", "true",
];

/// Returns a mutation of `sample`. Some mutations insert a part of `other`.
pub fn mutate_input(shape: InputShape, words: &[&str], sample: &[u8], other: &[u8], rng: &mut Rng) -> Vec<u8> {
    let changes = 1 + rng.usize(..4) * rng.usize(..3);
    let mut input = None;
    // Mutate one document in eight as text. Only text mutations produce duplicate keys, numbers
    // that are too large, and truncated strings.
    if shape == InputShape::Json
        && rng.u8(..8) > 0
        && let Ok(mut tree) = serde_json::from_slice::<Value>(sample)
    {
        let donor = serde_json::from_slice(other).unwrap_or(Value::Null);
        (0..changes).for_each(|_| mutate_document(&mut tree, &donor, words, rng));
        input = serde_json::to_vec(&tree).ok();
    }
    let mut input = input.unwrap_or_else(|| {
        let mut bytes = sample.to_vec();
        (0..changes).for_each(|_| mutate_bytes(&mut bytes, other, words, rng));
        bytes
    });
    input.truncate(MAX_INPUT_BYTES);
    input
}

/// Picks a random element. Returns `None` if the slice is empty.
fn pick_random<'a, T>(from: &'a [T], rng: &mut Rng) -> Option<&'a T> {
    rng.choice(from)
}

/// Returns a random string, usually a word of the input format.
fn random_text(words: &[&str], rng: &mut Rng) -> String {
    let from = match rng.u8(..8) {
        0 => SPECIAL_TEXTS,
        1 => NUMBERS,
        2 => return ["a", "9", "x::", "\u{fffd}", "-"][rng.usize(..5)].repeat(1 << rng.u32(..13)),
        _ => words,
    };
    pick_random(from, rng)
        .or_else(|| pick_random(SPECIAL_TEXTS, rng))
        .map_or_else(String::new, |text| (*text).to_owned())
}

/// Returns a random range within `length` bytes.
fn random_range(length: usize, rng: &mut Rng) -> std::ops::Range<usize> {
    let start = rng.usize(..=length);
    // Most ranges are short, because a long range replaces most of the sample.
    let most = if rng.u8(..4) > 0 { 16 } else { length };
    start..start + rng.usize(..=(length - start).min(most))
}

/// Applies one random mutation to bytes.
fn mutate_bytes(bytes: &mut Vec<u8>, other: &[u8], words: &[&str], rng: &mut Rng) {
    let range = random_range(bytes.len(), rng);
    match rng.u8(..10) {
        0 => bytes.truncate(range.start),
        1 => drop(bytes.drain(range)),
        2 => {
            if let Some(byte) = bytes.get_mut(range.start) {
                *byte ^= 1 << rng.u8(..8);
            }
        }
        3 => bytes.iter_mut().skip(range.start).take(1).for_each(|byte| *byte = rng.u8(..)),
        4 => {
            let copied = bytes.get(range.clone()).unwrap_or_default().repeat(1 << rng.u32(..6));
            insert_bytes(bytes, range.end, &copied);
        }
        5 => {
            let from = random_range(other.len(), rng);
            let spliced = other.get(from).unwrap_or_default().to_vec();
            drop(bytes.splice(range, spliced));
        }
        6 => {
            let tail = other.get(random_range(other.len(), rng).start..).unwrap_or_default().to_vec();
            bytes.truncate(range.start);
            bytes.extend(tail);
        }
        7 => {
            // Replace the next number.
            let digits = |byte: &u8| byte.is_ascii_digit();
            let start = bytes.iter().skip(range.start).position(digits).map_or(range.start, |at| range.start + at);
            let end = start + bytes.iter().skip(start).take_while(|byte| digits(byte)).count();
            let number = pick_digits(rng);
            drop(bytes.splice(start..end, number.bytes()));
        }
        8 => drop(bytes.splice(range, random_text(words, rng).into_bytes())),
        _ => insert_bytes(bytes, range.start, &random_text(words, rng).into_bytes()),
    }
    bytes.truncate(MAX_INPUT_BYTES);
}

/// Inserts bytes at a position.
fn insert_bytes(bytes: &mut Vec<u8>, at: usize, what: &[u8]) {
    drop(bytes.splice(at..at, what.iter().copied()));
}

/// Returns the number of values in a document. The document itself counts as a value.
fn count_values(tree: &Value) -> usize {
    1 + match tree {
        Value::Array(values) => values.iter().map(count_values).sum(),
        Value::Object(fields) => fields.values().map(count_values).sum(),
        _ => 0,
    }
}

/// Returns the value at position `number`, in the order in which [`count_values`] visits the
/// values.
fn value_at<'a>(tree: &'a mut Value, number: &mut usize) -> Option<&'a mut Value> {
    if *number == 0 {
        return Some(tree);
    }
    *number -= 1;
    match tree {
        Value::Array(values) => values.iter_mut().find_map(|value| value_at(value, number)),
        Value::Object(fields) => fields.values_mut().find_map(|value| value_at(value, number)),
        _ => None,
    }
}

/// Picks a value of a document by one of two methods. In the first method, each value is equally
/// likely. The second method descends from the root at random, so that long lists do not dominate.
fn pick_subvalue<'a>(tree: &'a mut Value, rng: &mut Rng) -> Option<&'a mut Value> {
    if rng.bool() {
        let mut number = rng.usize(..count_values(tree));
        return value_at(tree, &mut number);
    }
    let mut here = tree;
    loop {
        let below = match here {
            Value::Array(values) => values.len(),
            Value::Object(fields) => fields.len(),
            _ => 0,
        };
        if below == 0 || rng.u8(..8) == 0 {
            return Some(here);
        }
        let at = rng.usize(..below);
        here = match here {
            Value::Array(values) => values.get_mut(at)?,
            Value::Object(fields) => fields.values_mut().nth(at)?,
            _ => return None,
        };
    }
}

/// Returns a copy of a random value of a document.
fn random_value(tree: &Value, rng: &mut Rng) -> Value {
    let mut tree = tree.clone();
    pick_subvalue(&mut tree, rng).map(Value::take).unwrap_or_default()
}

/// Picks the digits of a number from [`NUMBERS`] or [`LARGEST_NUMBERS`].
fn pick_digits(rng: &mut Rng) -> &'static str {
    pick_random(if rng.u8(..3) == 0 { LARGEST_NUMBERS } else { NUMBERS }, rng).copied().unwrap_or_default()
}

/// Picks a JSON number from [`NUMBERS`] or [`LARGEST_NUMBERS`].
fn random_number(rng: &mut Rng) -> Value {
    serde_json::from_str(pick_digits(rng)).unwrap_or_default()
}

/// Returns a random JSON scalar.
fn random_scalar(words: &[&str], rng: &mut Rng) -> Value {
    match rng.u8(..6) {
        0 => Value::Null,
        1 => Value::Bool(rng.bool()),
        2 | 3 => random_number(rng),
        _ => Value::String(random_text(words, rng)),
    }
}

/// Applies one random mutation to a document.
fn mutate_document(tree: &mut Value, donor: &Value, words: &[&str], rng: &mut Rng) {
    let whole = if rng.bool() { random_value(tree, rng) } else { random_value(donor, rng) };
    let Some(value) = pick_subvalue(tree, rng) else { return };
    match rng.u8(..10) {
        0 => *value = whole,
        1 => *value = random_scalar(words, rng),
        2 => {
            // Some of these depths exceed the reader's limit.
            let depth = [1, 2, 100, 200][rng.usize(..4)];
            for _ in 0..depth {
                *value = Value::Array(vec![value.take()]);
            }
        }
        _ => match value {
            Value::Array(values) => mutate_array(values, whole, rng),
            Value::Object(fields) => mutate_object(fields, whole, words, rng),
            Value::String(string) => {
                let mut bytes = std::mem::take(string).into_bytes();
                mutate_bytes(&mut bytes, random_text(words, rng).as_bytes(), words, rng);
                *string = String::from_utf8_lossy(&bytes).into_owned();
            }
            Value::Number(_) if rng.bool() => {
                let near = value.as_i64().unwrap_or_default();
                *value = near.wrapping_add(rng.i64(-2..=2)).into();
            }
            Value::Number(_) => *value = random_number(rng),
            Value::Bool(bool) => *bool = !*bool,
            Value::Null => *value = random_scalar(words, rng),
        },
    }
}

/// Applies one random mutation to an array.
fn mutate_array(values: &mut Vec<Value>, whole: Value, rng: &mut Rng) {
    let at = rng.usize(..=values.len());
    match rng.u8(..5) {
        0 if at < values.len() => drop(values.remove(at)),
        1 => rng.shuffle(values),
        2 => {
            if let Some(value) = values.get(at).cloned() {
                let times = 1 << rng.u32(..6);
                values.extend(std::iter::repeat_n(value, times));
            }
        }
        _ => values.insert(at, whole),
    }
}

/// Applies one random mutation to an object.
fn mutate_object(fields: &mut Map<String, Value>, whole: Value, words: &[&str], rng: &mut Rng) {
    let keys: Vec<String> = fields.keys().cloned().collect();
    let key = pick_random(&keys, rng).cloned().unwrap_or_default();
    match rng.u8(..4) {
        0 => drop(fields.remove(&key)),
        1 => {
            if let Some(value) = fields.remove(&key) {
                fields.insert(random_text(words, rng), value);
            }
        }
        2 => drop(fields.insert(random_text(words, rng), whole)),
        _ => drop(fields.insert(key, whole)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &[u8] = br#"{"a": [1, {"b": "c"}], "d": null}"#;

    fn random_inputs(shape: InputShape, seed: u64) -> Vec<Vec<u8>> {
        let mut rng = Rng::with_seed(seed);
        (0..2000).map(|_| mutate_input(shape, &["word"], SAMPLE, b"[2,\"other\"]", &mut rng)).collect()
    }

    #[test]
    fn mutated_inputs_depend_only_on_the_seed() {
        for shape in [InputShape::Bytes, InputShape::Json] {
            assert_eq!(random_inputs(shape, 1), random_inputs(shape, 1));
            assert_ne!(random_inputs(shape, 1), random_inputs(shape, 2));
        }
    }

    #[test]
    fn most_mutated_documents_are_valid_and_some_contain_words_or_parts_of_other_documents() {
        let all = random_inputs(InputShape::Json, 7);
        let documents: Vec<Value> = all.iter().filter_map(|input| serde_json::from_slice(input).ok()).collect();
        assert!((1200..2000).contains(&documents.len()), "{}", documents.len());
        for part in ["other", "word", "18446744073709551615", "[[[["] {
            assert!(all.iter().any(|input| String::from_utf8_lossy(input).contains(part)), "{part}");
        }
        let mut numbers: Vec<usize> = documents.iter().map(count_values).collect();
        numbers.dedup();
        assert!(numbers.len() > 100, "the documents have too few shapes");
    }

    #[test]
    fn a_mutated_input_never_exceeds_the_maximum_length() {
        let mut rng = Rng::with_seed(3);
        let mut input = Vec::new();
        for round in 0..3000 {
            let shape = if round % 2 == 0 { InputShape::Bytes } else { InputShape::Json };
            let other = std::mem::take(&mut input);
            input = mutate_input(shape, &[], if round % 50 == 0 { b"" } else { &other }, &other, &mut rng);
            assert!(input.len() <= MAX_INPUT_BYTES);
        }
    }
}
