//! Thread percentages and memory limits: how they are written, which one holds, what a client sees
//! of them.

use serde::{Deserialize, Serialize};

/// The most client contexts of one server on this driver; the next is refused with error 808.
pub const MAX_CONTEXTS: usize = 48;
/// What NVML shows for the server itself, bytes.
pub const SERVER_MEMORY: u64 = 66 << 20;
/// What NVML shows for a client that has allocated nothing, bytes.
pub const CLIENT_MEMORY: u64 = 274 << 20;

/// The device that a limit is for.
#[derive(Debug, Clone, Copy)]
pub struct DeviceName<'a> {
    /// Its number among the devices that are visible.
    pub ordinal: usize,
    /// Its UUID.
    pub uuid: &'a str,
}

impl DeviceName<'_> {
    /// Whether `name` means this device: its ordinal, its UUID or the beginning of it.
    fn is(self, name: &str) -> bool {
        match name.parse::<usize>() {
            Ok(ordinal) => ordinal == self.ordinal,
            Err(_) => name.len() > 4 && self.uuid.starts_with(name),
        }
    }
}

/// What a server is told to bind its clients to when they connect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Active thread percentage.
    pub threads: f64,
    /// Memory limits as they were set, in order: the last one that names a device holds.
    pub memory: Vec<MemoryLimit>,
    /// 0 normal, 1 below normal.
    pub priority: u8,
}

/// A memory limit as an administrator wrote it: neither half is checked against what exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// Ordinal, UUID or the beginning of one.
    pub device: String,
    /// `<whole number>G` or `<whole number>M`.
    pub value: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self { threads: 100.0, memory: Vec::new(), priority: 0 }
    }
}

impl Settings {
    /// What a daemon starts with, from its own environment; what cannot be understood is ignored.
    pub fn from_environment(threads: Option<&str>, memory: Option<&str>) -> Self {
        let mut settings = Self { threads: threads.and_then(percentage).unwrap_or(100.0), ..Self::default() };
        for entry in memory.unwrap_or_default().split(',') {
            if let Some((device, value)) = entry.split_once('=') {
                settings.set_memory(device.trim(), value.trim());
            }
        }
        settings
    }

    /// Sets a device's limit, in place of one written for the same name; 0 takes it away.
    pub fn set_memory(&mut self, device: &str, value: &str) {
        self.memory.retain(|limit| limit.device != device);
        if bytes(value) != Some(0) {
            self.memory.push(MemoryLimit { device: device.to_owned(), value: value.to_owned() });
        }
    }

    /// The limit that was set under a name, as the daemon prints it: whole G, rounded down, from 1
    /// G on; else whole M.
    pub fn printed_memory(&self, device: &str) -> Option<String> {
        let limit = self.memory.iter().find(|limit| limit.device == device)?;
        let mib = bytes(&limit.value)? >> 20;
        Some(if mib >= 1024 { format!("{}G", mib / 1024) } else { format!("{mib}M") })
    }

    /// The limit that holds for a device, bytes.
    pub fn memory_of(&self, device: DeviceName<'_>) -> Option<u64> {
        self.memory.iter().rev().find(|limit| device.is(&limit.device)).and_then(|limit| bytes(&limit.value))
    }
}

/// A thread percentage, above 0, at most 100. Anything else is nothing: MPS ignores it.
pub fn percentage(text: &str) -> Option<f64> {
    text.trim().parse::<f64>().ok().filter(|percent| *percent > 0.0 && percent.is_finite()).map(|p| p.min(100.0))
}

/// Bytes of a limit. Only whole numbers are understood: of `8.5G` it is 8, and they are bytes.
pub fn bytes(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    match text[digits..].chars().next() {
        Some('G' | 'g') => number.checked_mul(1 << 30),
        Some('M' | 'm') => number.checked_mul(1 << 20),
        _ => Some(number),
    }
}

/// What a client's `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` does to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientMemory {
    /// Nothing: the server's limit holds.
    Unset,
    /// Lowers it to so many bytes; never raises it.
    Lowered(u64),
    /// Drops it, and the server's with it: one entry that names no visible device is enough.
    Escaped,
}

/// Reads a client's `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` against the devices that it sees.
pub fn client_memory(text: Option<&str>, devices: &[DeviceName<'_>], used: usize) -> ClientMemory {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return ClientMemory::Unset };
    let mut outcome = ClientMemory::Unset;
    for entry in text.split(',') {
        let Some((name, value)) = entry.split_once('=') else { return ClientMemory::Escaped };
        let Some(device) = devices.iter().position(|device| device.is(name)) else { return ClientMemory::Escaped };
        let Some(limit) = bytes(value) else { return ClientMemory::Escaped };
        if device == used {
            outcome = ClientMemory::Lowered(limit);
        }
    }
    outcome
}

/// The limit that binds a client, bytes, of the server's and what its own environment does.
pub fn effective_memory(server: Option<u64>, client: ClientMemory) -> Option<u64> {
    match client {
        ClientMemory::Unset => server,
        ClientMemory::Lowered(own) => Some(server.map_or(own, |server| server.min(own))),
        ClientMemory::Escaped => None,
    }
}

/// The percentage that binds a client, of the server's and its own: it can only be lowered.
pub fn effective_threads(server: f64, client: Option<f64>) -> f64 {
    client.map_or(server, |own| own.min(server))
}

/// What of a limit a context takes for itself, bytes, for the SMs that it sees.
///
/// Measured as limit less free memory: 123 MiB at 26 SMs, 271 at 66, 514 at 132; the line through
/// them.
pub fn context_overhead(sms: u32) -> u64 {
    (27 + (u64::from(sms) * 369 + 50) / 100) << 20
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-8f3c1a52-0000-4000-8000-000000000001";
    const ONE: [DeviceName<'_>; 1] = [DeviceName { ordinal: 0, uuid: UUID }];

    #[test]
    fn free_memory_under_a_limit_is_what_was_measured() {
        for (limit, sms, free) in [(8192, 132, 7678), (8192, 26, 8069), (20480, 66, 20209)] {
            assert_eq!((limit << 20) - context_overhead(sms), free << 20, "{limit} MiB, {sms} SMs");
        }
    }

    #[test]
    fn only_whole_values_with_a_unit_mean_what_they_say() {
        assert_eq!(bytes("8G"), Some(8 << 30));
        assert_eq!(bytes("8192M"), Some(8 << 30));
        assert_eq!(bytes("8.5G"), Some(8));
        assert_eq!(bytes("G"), None);
        assert_eq!(bytes("-1G"), None);
        assert_eq!(bytes("99999999999999999999G"), None);
        assert_eq!(bytes("18446744073709551615G"), None);
    }

    #[test]
    fn a_client_lowers_its_memory_by_ordinal_uuid_or_its_beginning() {
        for text in ["0=8G", "0=8192M", &format!("{UUID}=8G"), "GPU-8f3c=8G"] {
            assert_eq!(client_memory(Some(text), &ONE, 0), ClientMemory::Lowered(8 << 30), "{text}");
        }
        assert_eq!(client_memory(Some("0=8.5G"), &ONE, 0), ClientMemory::Lowered(8));
        assert_eq!(client_memory(None, &ONE, 0), ClientMemory::Unset);
        assert_eq!(client_memory(Some(""), &ONE, 0), ClientMemory::Unset);
    }

    #[test]
    fn a_client_drops_every_memory_limit_by_one_bad_entry() {
        for text in ["0=2G,1=4G", "1=8G", "8G", "junk", "0=", "0=junk", "0=2G,", "GPU-ffff=8G", "GPU-=8G"] {
            assert_eq!(client_memory(Some(text), &ONE, 0), ClientMemory::Escaped, "{text}");
            assert_eq!(effective_memory(Some(10 << 30), client_memory(Some(text), &ONE, 0)), None);
        }
    }

    #[test]
    fn a_client_never_raises_a_limit() {
        assert_eq!(effective_memory(Some(8 << 30), ClientMemory::Lowered(100 << 30)), Some(8 << 30));
        assert_eq!(effective_memory(Some(8 << 30), ClientMemory::Lowered(4 << 30)), Some(4 << 30));
        assert_eq!(effective_memory(None, ClientMemory::Lowered(4 << 30)), Some(4 << 30));
        assert!((effective_threads(50.0, Some(75.0)) - 50.0).abs() < f64::EPSILON);
        assert!((effective_threads(50.0, Some(25.0)) - 25.0).abs() < f64::EPSILON);
    }

    #[test]
    fn a_percentage_that_means_nothing_is_ignored() {
        for text in ["abc", "0", "", "-5", "NaN", "inf"] {
            assert_eq!(percentage(text), None, "{text}");
        }
        assert_eq!(percentage("12.5"), Some(12.5));
        assert_eq!(percentage("250"), Some(100.0));
    }

    #[test]
    fn the_last_setting_that_names_a_device_holds() {
        let mut settings = Settings::from_environment(Some("50"), Some("0=10G,junk,7=1G"));
        assert_eq!(settings.memory_of(ONE[0]), Some(10 << 30));
        settings.set_memory(UUID, "4G");
        assert_eq!(settings.memory_of(ONE[0]), Some(4 << 30));
        settings.set_memory("0", "2G");
        assert_eq!(settings.memory_of(ONE[0]), Some(2 << 30));
        settings.set_memory("5", "1G");
        assert_eq!(settings.memory_of(ONE[0]), Some(2 << 30));
        settings.set_memory("0", "0");
        assert_eq!(settings.memory_of(ONE[0]), Some(4 << 30));
    }

    #[test]
    fn a_limit_is_printed_as_was_measured() {
        for (set, printed) in [("8192M", "8G"), ("512M", "512M"), ("1024M", "1G"), ("1536M", "1G"), ("7678M", "7G")] {
            let mut settings = Settings::default();
            settings.set_memory("0", set);
            assert_eq!(settings.printed_memory("0").as_deref(), Some(printed), "{set}");
            assert_eq!(settings.printed_memory("1"), None);
        }
    }
}
