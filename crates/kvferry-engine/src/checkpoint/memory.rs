//! Whether a model fits in memory, asked before anything is read.

use super::LoadError;
use std::fs;

/// Refuses weights of `elements` elements, which take four bytes each once loaded, that memory has no room for.
/// Where the system does not say how much there is, everything fits.
pub(super) fn fits(file: &str, elements: u64) -> Result<(), LoadError> {
    within(file, elements, available().unwrap_or(u64::MAX))
}

fn within(file: &str, elements: u64, available: u64) -> Result<(), LoadError> {
    let needs = elements.saturating_mul(4);
    if needs <= available {
        Ok(())
    } else {
        Err(LoadError::TooLarge { file: file.to_owned(), needs, available })
    }
}

/// Bytes that new allocations can have without swapping, as Linux estimates them.
pub(crate) fn available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kilobytes = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kilobytes.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_larger_than_memory_is_told_by_how_much() {
        assert!(within("m", 1 << 30, 4 << 30).is_ok());
        assert_eq!(
            within("m", (1 << 30) + 1, 4 << 30).unwrap_err().to_string(),
            "m: its weights need 4.1 GiB of memory as f32, 4.0 GiB are available; use a smaller model or a machine \
             with more memory"
        );
        assert!(within("m", u64::MAX, u64::MAX - 1).is_err());
    }

    #[test]
    fn linux_says_what_is_available() {
        assert!(!cfg!(target_os = "linux") || available().is_some_and(|bytes| bytes > 0));
    }
}
