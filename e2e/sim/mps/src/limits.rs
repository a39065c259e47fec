//! Parses thread percentages and memory limits, and determines the limits that apply to a client.

use serde::{Deserialize, Serialize};

/// Maximum number of client contexts of a server with driver 580. The server refuses further
/// contexts with error 808.
pub const MAX_CLIENT_CONTEXTS: usize = 48;
/// Memory that NVML reports for the server process, in bytes.
pub const SERVER_MEMORY_BYTES: u64 = 66 << 20;
/// Memory that NVML reports for a client without allocations, in bytes.
pub const CLIENT_MEMORY_BYTES: u64 = 274 << 20;

/// The names by which a memory limit can refer to a device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceName<'a> {
    /// The device's ordinal among the visible devices.
    pub ordinal: usize,
    /// The device's UUID.
    pub uuid: &'a str,
}

impl DeviceName<'_> {
    /// Returns whether `name` is the device's ordinal, its UUID or a prefix of its UUID.
    fn matches_device(self, name: &str) -> bool {
        match name.parse::<usize>() {
            Ok(ordinal) => ordinal == self.ordinal,
            Err(_) => name.len() > 4 && self.uuid.starts_with(name),
        }
    }
}

/// The limits that a server applies to a client when the client connects.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClientSettings {
    /// The active thread percentage.
    pub threads: f64,
    /// Memory limits in the order in which they were set. The last limit that names a device
    /// applies to it.
    pub memory: Vec<MemoryLimit>,
    /// The priority: 0 is normal, 1 is below normal.
    pub priority: u8,
}

/// A memory limit, as an administrator or the daemon's environment set it. This type validates
/// neither field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// The device's ordinal, its UUID or a prefix of its UUID.
    pub device: String,
    /// The value, `<whole number>G` or `<whole number>M`.
    pub value: String,
}

impl Default for ClientSettings {
    fn default() -> Self {
        Self { threads: 100.0, memory: Vec::new(), priority: 0 }
    }
}

impl ClientSettings {
    /// Reads a daemon's initial settings from its environment. Invalid values are ignored.
    pub fn from_environment(threads: Option<&str>, memory: Option<&str>) -> Self {
        let mut settings = Self { threads: threads.and_then(parse_percentage).unwrap_or(100.0), ..Self::default() };
        for entry in memory.unwrap_or_default().split(',') {
            if let Some((device, value)) = entry.split_once('=') {
                settings.set_memory_limit(device.trim(), value.trim());
            }
        }
        settings
    }

    /// Sets the memory limit for a device name, and replaces an existing limit for the same name.
    /// The value 0 removes the limit.
    pub fn set_memory_limit(&mut self, device: &str, value: &str) {
        self.memory.retain(|limit| limit.device != device);
        if parse_bytes(value) != Some(0) {
            self.memory.push(MemoryLimit { device: device.to_owned(), value: value.to_owned() });
        }
    }

    /// Returns the memory limit for a device name, as the daemon prints it. Limits of at least 1 G
    /// are printed in G, and lower limits in M, both rounded down.
    pub fn format_memory_limit(&self, device: &str) -> Option<String> {
        let limit = self.memory.iter().find(|limit| limit.device == device)?;
        let mib = parse_bytes(&limit.value)? >> 20;
        Some(if mib >= 1024 { format!("{}G", mib / 1024) } else { format!("{mib}M") })
    }

    /// Returns the memory limit of a device, in bytes. Returns `None` if no limit applies to the
    /// device.
    pub fn memory_limit_of(&self, device: DeviceName<'_>) -> Option<u64> {
        self.memory
            .iter()
            .rev()
            .find(|limit| device.matches_device(&limit.device))
            .and_then(|limit| parse_bytes(&limit.value))
    }
}

/// Parses a thread percentage. Values above 100 count as 100. MPS ignores invalid values.
pub fn parse_percentage(text: &str) -> Option<f64> {
    text.trim().parse::<f64>().ok().filter(|percent| *percent > 0.0 && percent.is_finite()).map(|p| p.min(100.0))
}

/// Parses a memory limit, and returns it in bytes. MPS accepts units only after whole numbers:
/// `8.5G` means 8 bytes.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    match text[digits..].chars().next() {
        Some('G' | 'g') => number.checked_mul(1 << 30),
        Some('M' | 'm') => number.checked_mul(1 << 20),
        _ => Some(number),
    }
}

/// The effect of a client's `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientMemoryLimit {
    /// No effect: the server's limit applies.
    Unset,
    /// Lowers the limit to this number of bytes. Cannot raise the limit.
    Lowered(u64),
    /// Removes all memory limits, including the server's. A single invalid entry, such as an entry
    /// that names no visible device, has this effect.
    Escaped,
}

/// Returns the effect of a client's `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` on one device. `devices` are
/// the devices that are visible to the client, and `used` is the index of the device that the
/// client uses.
pub fn parse_client_memory_limit(text: Option<&str>, devices: &[DeviceName<'_>], used: usize) -> ClientMemoryLimit {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return ClientMemoryLimit::Unset };
    let mut outcome = ClientMemoryLimit::Unset;
    for entry in text.split(',') {
        let Some((name, value)) = entry.split_once('=') else { return ClientMemoryLimit::Escaped };
        let Some(device) = devices.iter().position(|device| device.matches_device(name)) else {
            return ClientMemoryLimit::Escaped;
        };
        let Some(limit) = parse_bytes(value) else { return ClientMemoryLimit::Escaped };
        if device == used {
            outcome = ClientMemoryLimit::Lowered(limit);
        }
    }
    outcome
}

/// Returns the effective memory limit of a client in bytes, from the server's limit and the
/// client's environment. Returns `None` if no limit applies.
pub fn effective_memory_limit(server: Option<u64>, client: ClientMemoryLimit) -> Option<u64> {
    match client {
        ClientMemoryLimit::Unset => server,
        ClientMemoryLimit::Lowered(own) => Some(server.map_or(own, |server| server.min(own))),
        ClientMemoryLimit::Escaped => None,
    }
}

/// Returns the effective thread percentage of a client. The client's value can lower the server's
/// value, but cannot raise it.
pub fn effective_thread_percentage(server: f64, client: Option<f64>) -> f64 {
    client.map_or(server, |own| own.min(server))
}

/// Returns the overhead of a context with this number of SMs, in bytes. The overhead counts against
/// the memory limit.
///
/// On an H200 with driver 580, the overhead (limit minus free memory) was 123 MiB with 26 SMs, 271
/// MiB with 66 SMs, and 514 MiB with 132 SMs. The function is the line through these three points.
pub fn context_overhead(sms: u32) -> u64 {
    (27 + (u64::from(sms) * 369 + 50) / 100) << 20
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU_UUID: &str = "GPU-8f3c1a52-0000-4000-8000-000000000001";
    const ONE_DEVICE: [DeviceName<'_>; 1] = [DeviceName { ordinal: 0, uuid: GPU_UUID }];

    #[test]
    fn the_context_overhead_matches_the_measurements() {
        for (limit, sms, free) in [(8192, 132, 7678), (8192, 26, 8069), (20480, 66, 20209)] {
            assert_eq!((limit << 20) - context_overhead(sms), free << 20, "{limit} MiB, {sms} SMs");
        }
    }

    #[test]
    fn fractions_and_missing_units_are_parsed_as_mps_parses_them() {
        assert_eq!(parse_bytes("8G"), Some(8 << 30));
        assert_eq!(parse_bytes("8192M"), Some(8 << 30));
        assert_eq!(parse_bytes("8.5G"), Some(8));
        assert_eq!(parse_bytes("G"), None);
        assert_eq!(parse_bytes("-1G"), None);
        assert_eq!(parse_bytes("99999999999999999999G"), None);
        assert_eq!(parse_bytes("18446744073709551615G"), None);
    }

    #[test]
    fn a_client_can_lower_its_memory_limit_by_ordinal_uuid_or_prefix() {
        for text in ["0=8G", "0=8192M", &format!("{GPU_UUID}=8G"), "GPU-8f3c=8G"] {
            assert_eq!(
                parse_client_memory_limit(Some(text), &ONE_DEVICE, 0),
                ClientMemoryLimit::Lowered(8 << 30),
                "{text}"
            );
        }
        assert_eq!(parse_client_memory_limit(Some("0=8.5G"), &ONE_DEVICE, 0), ClientMemoryLimit::Lowered(8));
        assert_eq!(parse_client_memory_limit(None, &ONE_DEVICE, 0), ClientMemoryLimit::Unset);
        assert_eq!(parse_client_memory_limit(Some(""), &ONE_DEVICE, 0), ClientMemoryLimit::Unset);
    }

    #[test]
    fn an_invalid_entry_removes_all_memory_limits() {
        for text in ["0=2G,1=4G", "1=8G", "8G", "junk", "0=", "0=junk", "0=2G,", "GPU-ffff=8G", "GPU-=8G"] {
            assert_eq!(parse_client_memory_limit(Some(text), &ONE_DEVICE, 0), ClientMemoryLimit::Escaped, "{text}");
            assert_eq!(
                effective_memory_limit(Some(10 << 30), parse_client_memory_limit(Some(text), &ONE_DEVICE, 0)),
                None
            );
        }
    }

    #[test]
    fn a_client_cannot_raise_a_limit() {
        assert_eq!(effective_memory_limit(Some(8 << 30), ClientMemoryLimit::Lowered(100 << 30)), Some(8 << 30));
        assert_eq!(effective_memory_limit(Some(8 << 30), ClientMemoryLimit::Lowered(4 << 30)), Some(4 << 30));
        assert_eq!(effective_memory_limit(None, ClientMemoryLimit::Lowered(4 << 30)), Some(4 << 30));
        assert!((effective_thread_percentage(50.0, Some(75.0)) - 50.0).abs() < f64::EPSILON);
        assert!((effective_thread_percentage(50.0, Some(25.0)) - 25.0).abs() < f64::EPSILON);
    }

    #[test]
    fn an_invalid_percentage_is_ignored() {
        for text in ["abc", "0", "", "-5", "NaN", "inf"] {
            assert_eq!(parse_percentage(text), None, "{text}");
        }
        assert_eq!(parse_percentage("12.5"), Some(12.5));
        assert_eq!(parse_percentage("250"), Some(100.0));
    }

    #[test]
    fn the_last_setting_for_a_device_applies() {
        let mut settings = ClientSettings::from_environment(Some("50"), Some("0=10G,junk,7=1G"));
        assert_eq!(settings.memory_limit_of(ONE_DEVICE[0]), Some(10 << 30));
        settings.set_memory_limit(GPU_UUID, "4G");
        assert_eq!(settings.memory_limit_of(ONE_DEVICE[0]), Some(4 << 30));
        settings.set_memory_limit("0", "2G");
        assert_eq!(settings.memory_limit_of(ONE_DEVICE[0]), Some(2 << 30));
        settings.set_memory_limit("5", "1G");
        assert_eq!(settings.memory_limit_of(ONE_DEVICE[0]), Some(2 << 30));
        settings.set_memory_limit("0", "0");
        assert_eq!(settings.memory_limit_of(ONE_DEVICE[0]), Some(4 << 30));
    }

    #[test]
    fn limits_are_printed_as_mps_prints_them() {
        for (set, printed) in [("8192M", "8G"), ("512M", "512M"), ("1024M", "1G"), ("1536M", "1G"), ("7678M", "7G")] {
            let mut settings = ClientSettings::default();
            settings.set_memory_limit("0", set);
            assert_eq!(settings.format_memory_limit("0").as_deref(), Some(printed), "{set}");
            assert_eq!(settings.format_memory_limit("1"), None);
        }
    }
}
