//! Names of the objects that Cleave publishes, and names from allocated claims.
//!
//! Names of devices never change between versions: the scheduler knows an allocated device only by
//! its name. A name contains the GPU and the placement, and never an index.
use std::fmt;

/// Name of the DRA driver.
pub const DRIVER: &str = "gpu.cleave.dev";

/// Maximum length of a DNS label, in bytes.
const MAX_LABEL_LENGTH: usize = 63;
/// Maximum length of the label of a MIG profile, in bytes, so that names of devices are labels.
const MAX_PROFILE_LENGTH: usize = 32;
/// Maximum length of the name of an object, in bytes.
const MAX_NAME_LENGTH: usize = 253;

/// A name that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is not {expected}")]
pub struct InvalidName {
    /// The name, [`quoted`].
    pub name: String,
    /// What the name should be.
    pub expected: &'static str,
}

fn invalid(name: &str, expected: &'static str) -> InvalidName {
    InvalidName { name: quoted(name), expected }
}

/// Returns a text from an object as it is shown in messages: in quotation marks, at most 64
/// characters, and with control characters escaped.
pub(crate) fn quoted(text: &str) -> String {
    let short: String = text.chars().take(64).collect();
    let end = if short.len() < text.len() { "..." } else { "" };
    format!("{short:?}{end}")
}

/// The UUID of a GPU, as NVML reports it: `GPU-` and a UUID in lower case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid(String);

impl GpuUuid {
    /// Parses a UUID.
    ///
    /// # Errors
    /// Returns an error if the text is not a GPU's UUID, for example the UUID of a MIG device.
    pub fn new(text: &str) -> Result<Self, InvalidName> {
        match text.strip_prefix("GPU-") {
            Some(uuid) if is_uuid(uuid) => Ok(Self(text.to_owned())),
            _ => Err(invalid(text, "the UUID of a GPU")),
        }
    }

    /// Returns the UUID as NVML reports it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name of the whole GPU as a device: `gpu-` and the first eight digits of the
    /// UUID. All other names of the GPU's devices start with this name.
    pub(crate) fn device_name(&self) -> String {
        let digits: String = self.0.chars().skip("GPU-".len()).take(8).collect();
        format!("gpu-{digits}")
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a node that is short enough for the names of its slices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeName(String);

impl NodeName {
    /// Checks the length of a node's name. The API server has checked its characters.
    ///
    /// # Errors
    /// Returns an error if the name is empty, or too long for the names of the node's slices.
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        let node = Self(name.to_owned());
        if name.is_empty() || node.slice(0).len() > MAX_NAME_LENGTH || node.pool().len() > MAX_NAME_LENGTH {
            return Err(invalid(name, "the name of a node with at most 232 characters"));
        }
        Ok(node)
    }

    /// Returns the name of the node.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name of the node's pool. The prefix distinguishes the pool from NVIDIA's pool,
    /// which has the name of the node: Kubernetes before 1.36.4 confuses counters of pools that
    /// differ only in their driver.
    pub fn pool(&self) -> String {
        format!("cleave/{}", self.0)
    }

    /// Returns the name of a slice. The scheduler tries slices in the order of their names.
    pub(crate) fn slice(&self, index: usize) -> String {
        format!("{index:05}-{DRIVER}-{}", self.0)
    }
}

/// Identifies a share of a device: a UUID. The scheduler creates the ID when it allocates the
/// share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShareId(String);

impl ShareId {
    /// Parses the ID.
    ///
    /// # Errors
    /// Returns an error if the text is not a UUID. The ID becomes part of file names.
    pub fn new(text: &str) -> Result<Self, InvalidName> {
        if is_uuid(text) { Ok(Self(text.to_owned())) } else { Err(invalid(text, "a UUID in lower case")) }
    }

    /// Returns the UUID.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name of a request of a claim, without the name of the chosen subrequest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestName(String);

impl RequestName {
    /// Parses the name of the request in an allocation, `request` or `request/subrequest`. The
    /// kubelet knows only the name of the request.
    ///
    /// # Errors
    /// Returns an error if a part is not a DNS label. The name becomes part of file names.
    pub fn new(text: &str) -> Result<Self, InvalidName> {
        let (request, subrequest) = text.split_once('/').unwrap_or((text, "none"));
        if is_label(request) && is_label(subrequest) {
            return Ok(Self(request.to_owned()));
        }
        Err(invalid(text, "the name of a request"))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns a MIG profile's name as a part of a DNS label: `1g.10gb+me` becomes `1g10gb-plus-me`.
/// Returns `None` if the result would not be a part of a label.
///
/// Profiles that differ only in dots have the same label. NVIDIA has no such profiles, and
/// [`Pool`](crate::Pool) offers only one of them.
pub(crate) fn profile_label(profile: &str) -> Option<String> {
    let label = profile.replace('.', "").replace('-', "-minus-").replace('+', "-plus-");
    (is_label(&label) && label.len() <= MAX_PROFILE_LENGTH).then_some(label)
}

/// Returns whether the text is a DNS label.
fn is_label(text: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= MAX_LABEL_LENGTH
        && text.bytes().all(|byte| alphanumeric(byte) || byte == b'-')
        && text.bytes().next().is_some_and(alphanumeric)
        && text.bytes().last().is_some_and(alphanumeric)
}

/// Returns whether the text is a UUID in lower case.
fn is_uuid(text: &str) -> bool {
    let digits = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let groups: Vec<&str> = text.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]) && text.bytes().all(|byte| digits(byte) || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_uuids_of_gpus_are_accepted() {
        let uuid = GpuUuid::new("GPU-2dd884f1-5fc4-5d41-8059-30551187688f").expect("valid");
        assert_eq!(uuid.device_name(), "gpu-2dd884f1");
        for text in [
            "",
            "GPU-",
            "2dd884f1-5fc4-5d41-8059-30551187688f",
            "MIG-2dd884f1-5fc4-5d41-8059-30551187688f",
            "GPU-2dd884f1-5fc4-5d41-8059-30551187688",
            "GPU-2DD884F1-5fc4-5d41-8059-30551187688f",
            "GPU-2dd884f-15fc4-5d41-8059-30551187688f",
            "GPU-2dd884f1-5fc4-5d41-8059-3055118/688f",
        ] {
            assert!(GpuUuid::new(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_from_claims_cannot_leave_a_directory() {
        assert_eq!(RequestName::new("gpu/small").map(|name| name.as_str().to_owned()), Ok("gpu".to_owned()));
        for text in ["", "/", "gpu/", "../x", "gpu/../x", "a/b/c", "a b", "-a", &"a".repeat(64)] {
            assert!(RequestName::new(text).is_err(), "{text}");
        }
        assert!(ShareId::new("6ba7b810-9dad-11d1-80b4-00c04fd430c8").is_ok());
        assert!(ShareId::new("../../etc").is_err());
    }

    #[test]
    fn names_in_messages_are_short_and_printable() {
        assert_eq!(quoted("gpu\n\u{1b}[1m"), r#""gpu\n\u{1b}[1m""#);
        assert!(quoted(&"x".repeat(100_000)).len() < 80);
        assert!(RequestName::new(&"/".repeat(100_000)).is_err_and(|error| error.to_string().len() < 120));
    }

    #[test]
    fn the_longest_node_name_still_has_valid_slices() {
        let longest = NodeName::new(&"n".repeat(232)).expect("fits");
        assert!(longest.slice(99_999).len() <= MAX_NAME_LENGTH);
        assert!(NodeName::new(&"n".repeat(233)).is_err());
        assert!(NodeName::new("").is_err());
    }

    #[test]
    fn profiles_have_distinct_labels() {
        let label = |profile| profile_label(profile).expect("valid");
        assert_eq!(label("1g.10gb"), "1g10gb");
        assert_eq!(label("1g.24gb+me.all"), "1g24gb-plus-meall");
        assert_ne!(label("1g.24gb-me"), label("1g.24gb+me"));
        assert_eq!(profile_label(&"1".repeat(33)), None);
        assert_eq!(profile_label("1G.10gb"), None);
        assert_eq!(profile_label(""), None);
        assert_eq!(profile_label("1g.10gb+"), None);
    }
}
