//! Targets for short strings with a grammar: annotations, quantities and names.
use cleave_agent::gpu::layout::{parse_slice_id, slice_id};
use cleave_api::cordon::{Cordons, GpuTimes, check_reason};
use cleave_api::placement::Placement;
use cleave_kubelet::{DeviceId, ResourceName};
use cleave_plan::Quantity;

use super::mps;
use crate::mutate::InputShape;
use crate::{ReadResult, Target, assert_printable};

pub(super) const PLACEMENT: Target = Target {
    name: "placement",
    what: "a pod's annotation with its reservation",
    shape: InputShape::Json,
    words: &["until", "nodes", "resource", "units", "device", "n1", "nvidia.com/gpu-mps"],
    samples: || {
        vec![
            br#"{"until":1795257516,"nodes":{"n1":[{"resource":"nvidia.com/gpu-mps","units":3,"device":"GPU-1"}],"n2":[]}}"#
                .to_vec(),
        ]
    },
    inputs: 8_000,
    run: |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let Ok(read) = Placement::parse(&text) else { return ReadResult::Refused };
        let again = read.to_text().and_then(|text| Placement::parse(&text));
        assert!(again.as_ref().is_ok_and(|again| *again == read), "{again:?}");
        mps::check_round_trip::<Placement>(bytes)
    },
};

pub(super) const CORDON_ANNOTATIONS: Target = Target {
    name: "annotations",
    what: "annotations that cordon GPUs and clear faults",
    shape: InputShape::Bytes,
    words: &[
        ",",
        "=",
        "GPU-a",
        "fan",
        "2026-11-21T20:00:00Z",
        "2026-11-21T20:00:00.7+05:30",
        "-009999-01-01T00:00:00Z",
        "9999-12-30T22:00:00Z",
    ],
    samples: || {
        vec![b"GPU-a, GPU-b=new fan=yes ,,=x,".to_vec(), b"GPU-a=2026-11-21T20:00:00.7Z,GPU-b=soon,GPU-c".to_vec()]
    },
    inputs: 20_000,
    run: |bytes| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let (cordons, cleared) = (Cordons::read(Some(&text)), GpuTimes::read(Some(&text)));
        assert_eq!(Cordons::read(Some(&cordons.to_string())), cordons);
        assert_eq!(GpuTimes::read(Some(&cleared.to_string())), cleared);
        assert!(cordons.0.keys().chain(cleared.0.keys()).all(|uuid| !uuid.is_empty() && text.contains(uuid)));
        if let Err(error) = check_reason(&text) {
            assert_printable(&error.to_string());
        }
        if cordons.0.is_empty() { ReadResult::Refused } else { ReadResult::Read }
    },
};

pub(super) const QUANTITY: Target = Target {
    name: "quantity",
    what: "Kubernetes quantities, as text and as a JSON number",
    shape: InputShape::Bytes,
    words: &["Ki", "Mi", "Gi", "Ei", "n", "u", "m", "k", "E", "e", "e-", "+", "-", ".", "\"", "18446744073709551615"],
    samples: || {
        ["64000m", "0.5", ".5", "1.5Ki", "1e3", "5e-1", "1001u", "+2", "16Ei", "\"2Gi\""]
            .map(|text| text.as_bytes().to_vec())
            .to_vec()
    },
    inputs: 30_000,
    run: |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let read = Quantity::new(&text);
        assert_eq!(read.to_string(), text);
        let parsed = serde_json::from_slice::<Quantity>(bytes).ok();
        for quantity in [Some(&read), parsed.as_ref()].into_iter().flatten() {
            let again = serde_json::to_vec(quantity).and_then(|json| serde_json::from_slice::<Quantity>(&json));
            assert!(again.as_ref().is_ok_and(|again| again.milli() == quantity.milli()), "{quantity:?} is {again:?}");
            if let (Some(milli), Some(count)) = (quantity.milli(), quantity.count()) {
                assert!(count <= milli);
            }
        }
        // Appending a digit must not make a quantity smaller.
        if let (Some(milli), true) = (read.milli(), text.bytes().all(|byte| byte.is_ascii_digit())) {
            let tenfold = Quantity::new(&format!("{text}0")).milli();
            assert!(tenfold.is_none_or(|tenfold| tenfold >= milli), "{text}");
        }
        if read.milli().is_some() || parsed.is_some() { ReadResult::Read } else { ReadResult::Refused }
    },
};

pub(super) const RESOURCE_AND_DEVICE_NAMES: Target = Target {
    name: "names",
    what: "names of resources, and ids of devices",
    shape: InputShape::Bytes,
    words: &[
        "nvidia.com/",
        "gpu-mps",
        "mig-1g.10gb",
        "kubernetes.io/",
        "requests.",
        "/",
        ".",
        "-",
        "::",
        "::0",
        "::4294967295",
        "GPU-",
    ],
    samples: || {
        [
            "nvidia.com/gpu",
            "nvidia.com/mig-1g.10gb.shared",
            "a.b/C_d",
            "GPU-fef8089b-4820-abfc-e83e-94318197576e::47",
            "MIG-x::0",
        ]
        .map(|text| text.as_bytes().to_vec())
        .to_vec()
    },
    inputs: 30_000,
    run: |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let name = ResourceName::parse(&text);
        match &name {
            Ok(name) => {
                assert_eq!(name.as_str(), text);
                assert!(text.len() <= 308 && text.is_ascii() && text.matches('/').count() == 1);
            }
            Err(error) => assert_printable(&error.to_string()),
        }
        match DeviceId::parse(&text) {
            Ok(id) => assert_eq!(id.as_str(), text),
            Err(error) => assert_printable(&error.to_string()),
        }
        let id = parse_slice_id(&text);
        if let Some((device, number)) = id {
            assert_eq!(slice_id(device, number), text, "a slice has two ids");
        }
        if name.is_ok() || id.is_some() { ReadResult::Read } else { ReadResult::Refused }
    },
};
