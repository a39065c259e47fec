//! Converts amounts and weights of other quota systems to Cleave's units.
use cleave_plan::Quantity;
use cleave_plan::quota::{Amount, GPU, Unit};

/// Why an amount is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum InvalidAmount {
    /// The amount is negative, malformed, or has an unknown unit.
    #[error("{field} {written:?} is not an amount: it is negative, malformed, or has an unknown unit")]
    Malformed {
        /// The field and resource.
        field: String,
        /// The written text.
        written: String,
    },
    /// The amount of memory is not a whole number of GB.
    #[error("{field} {written:?} is not a whole number of GB, such as 40")]
    NotGigabytes {
        /// The field and resource.
        field: String,
        /// The written text.
        written: String,
    },
    /// The amount is more precise than a quota can count.
    #[error("{field} {written:?} is too precise: thousandths of a GPU are the smallest step")]
    TooPrecise {
        /// The field and resource.
        field: String,
        /// The written text.
        written: String,
    },
    /// The amount exceeds the maximum of a quota.
    #[error("{field} {written:?} is too large: the maximum is 1000000 GPUs, or 999999999 GiB of memory")]
    TooLarge {
        /// The field and resource.
        field: String,
        /// The written text.
        written: String,
    },
}

/// Maximum amount of a quota in GPUs.
const MAX_GPUS: u64 = 1_000_000;
/// Maximum amount of a quota in GiB. The API accepts nine digits.
const MAX_GIB: u64 = 999_999_999;
/// Maximum weight of a quota.
const MAX_WEIGHT: u64 = 1000;

/// Parses a number of GPUs.
pub(super) fn parse_gpus(field: &str, written: &Quantity) -> Result<Amount, InvalidAmount> {
    let text = written.to_string();
    let owned = || (field.to_owned(), text.clone());
    let Some(milli) = written.milli() else {
        let (field, written) = owned();
        return Err(InvalidAmount::Malformed { field, written });
    };
    if milli > MAX_GPUS * 1000 {
        let (field, written) = owned();
        return Err(InvalidAmount::TooLarge { field, written });
    }
    // `Quantity::milli` rounds up to thousandths, so inspect the text.
    if is_finer_than_thousandths(&text) {
        let (field, written) = owned();
        return Err(InvalidAmount::TooPrecise { field, written });
    }
    Ok(Amount(milli * (GPU.0 / 1000)))
}

/// Parses an amount of GPU memory that Nos writes without a unit, and returns it in MiB. `size` is
/// the size of one unit in GB: the size of a slice, or 1.
pub(super) fn parse_gigabytes(field: &str, written: &Quantity, size: u64) -> Result<Amount, InvalidAmount> {
    let text = written.to_string();
    let digits = text.strip_prefix('+').unwrap_or(&text);
    if written.milli().is_none() {
        return Err(InvalidAmount::Malformed { field: field.to_owned(), written: text });
    }
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    let Some(count) = written.count().filter(|_| is_plain) else {
        return Err(InvalidAmount::NotGigabytes { field: field.to_owned(), written: text });
    };
    match count.checked_mul(size).filter(|&gib| gib <= MAX_GIB) {
        Some(gib) => Ok(Amount(gib << 10)),
        None => Err(InvalidAmount::TooLarge { field: field.to_owned(), written: text }),
    }
}

fn is_finer_than_thousandths(text: &str) -> bool {
    let fraction = text.split_once('.').map_or("", |(_, fraction)| fraction);
    let digits = fraction.trim_end_matches(|c: char| !c.is_ascii_digit()).trim_end_matches('0').len();
    text.ends_with(['n', 'u'])
        || text.contains("e-")
        || text.contains("E-")
        || digits > if text.ends_with('m') { 0 } else { 3 }
}

/// Formats an amount for a `GpuQuota`: `2.5` for GPUs, or `40Gi` for memory.
pub(super) fn amount_text(amount: Amount, unit: Unit) -> String {
    match unit {
        Unit::Gpus => amount.to_string(),
        Unit::Memory if amount.0.is_multiple_of(1 << 10) => format!("{}Gi", amount.0 >> 10),
        Unit::Memory => format!("{}Mi", amount.0),
    }
}

/// Weights that have the same ratio as some numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Weights {
    pub(super) weights: Vec<u32>,
    /// Whether the ratios are exact. The weights are rounded if the largest weight would exceed
    /// 1000.
    pub(super) is_exact: bool,
}

/// Returns the smallest whole weights from 1 to 1000 that have the same ratio as `numbers`. A
/// number of 0 has weight 1.
pub(super) fn scale_weights(numbers: &[u64]) -> Weights {
    let divisor = numbers.iter().copied().filter(|&number| number > 0).fold(0, greatest_common_divisor).max(1);
    let largest = numbers.iter().copied().max().unwrap_or_default() / divisor;
    let weight = |number: &u64| {
        let reduced = number / divisor;
        let scaled = if largest > MAX_WEIGHT {
            // Rounded to the nearest.
            let product = u128::from(reduced) * u128::from(MAX_WEIGHT) * 2 + u128::from(largest);
            u64::try_from(product / (2 * u128::from(largest))).unwrap_or(MAX_WEIGHT)
        } else {
            reduced
        };
        u32::try_from(scaled.clamp(1, MAX_WEIGHT)).unwrap_or(1)
    };
    Weights { weights: numbers.iter().map(weight).collect(), is_exact: largest <= MAX_WEIGHT }
}

const fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(text: &str) -> Result<String, InvalidAmount> {
        parse_gpus("min x", &Quantity::new(text)).map(|amount| amount_text(amount, Unit::Gpus))
    }

    fn gigabytes(text: &str, size: u64) -> Result<String, InvalidAmount> {
        parse_gigabytes("min x", &Quantity::new(text), size).map(|amount| amount_text(amount, Unit::Memory))
    }

    #[test]
    fn amounts_keep_their_value() {
        for (text, expected) in
            [("4", "4"), ("2500m", "2.5"), ("0.125", "0.125"), ("1k", "1000"), ("0", "0"), ("1000000", "1000000")]
        {
            assert_eq!(gpus(text).as_deref(), Ok(expected), "{text}");
        }
        assert_eq!(gigabytes("16", 1).as_deref(), Ok("16Gi"));
        assert_eq!(gigabytes("3", 10).as_deref(), Ok("30Gi"));
        assert_eq!(amount_text(Amount(1536), Unit::Memory), "1536Mi");
    }

    #[test]
    fn an_invalid_amount_is_refused_with_its_reason() {
        for text in ["-1", "many", "4 GPUs", "4Gb", "", "1e30"] {
            assert!(matches!(gpus(text), Err(InvalidAmount::Malformed { .. })), "{text}");
        }
        for text in ["1000001", "1Ei", "18446744073709551615"] {
            assert!(matches!(gpus(text), Err(InvalidAmount::TooLarge { .. })), "{text}");
        }
        for text in ["1u", "0.0005", "1.5m"] {
            assert!(matches!(gpus(text), Err(InvalidAmount::TooPrecise { .. })), "{text}");
        }
        for text in ["40Gi", "500m", "2.5", "1k"] {
            assert!(matches!(gigabytes(text, 1), Err(InvalidAmount::NotGigabytes { .. })), "{text}");
        }
        assert!(matches!(gigabytes("-1", 1), Err(InvalidAmount::Malformed { .. })));
        assert!(matches!(gigabytes("100000000", 10), Err(InvalidAmount::TooLarge { .. })));
        assert_eq!(
            gpus("-1").unwrap_err().to_string(),
            "min x \"-1\" is not an amount: it is negative, malformed, or has an unknown unit"
        );
    }

    #[test]
    fn weights_are_the_smallest_numbers_in_the_same_ratio() {
        let weights = |numbers: &[u64]| scale_weights(numbers).weights;
        assert_eq!(weights(&[40, 10, 30]), [4, 1, 3]);
        assert_eq!(weights(&[750, 1000, 0]), [3, 4, 1]);
        assert_eq!(weights(&[0, 0]), [1, 1]);
        assert_eq!(weights(&[]), [0; 0]);
        assert_eq!(scale_weights(&[1, u64::MAX]), Weights { weights: vec![1, 1000], is_exact: false });
        assert_eq!(weights(&[u64::MAX, u64::MAX - 1]), [1000, 1000]);
    }
}
