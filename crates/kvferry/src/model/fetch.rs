//! Bytes from somewhere into a file: hashed and counted on the way, renamed only when they are right.

use std::{
    fmt,
    fs::{File, Permissions},
    io::{Read, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use sha2::{Digest, Sha256};

/// Longest silence of a server.
const PATIENCE: Duration = Duration::from_secs(30);

/// Whether a progress bar is drawn (on stderr, and only when that is a terminal).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Quiet,
    Shown,
}

impl Progress {
    /// A bar of `total` bytes, or a spinner with a running count.
    pub(super) fn bytes(self, what: &str, total: Option<u64>) -> ProgressBar {
        let style = match total {
            Some(_) => "{msg}  {bar:20.cyan/dim}  {bytes} of {total_bytes}  {binary_bytes_per_sec}  {eta}",
            None => "{spinner:.cyan} {msg}  {bytes}  {binary_bytes_per_sec}",
        };
        self.bar(total, style, what)
    }

    /// A spinner for work whose size is not known.
    pub(crate) fn spinner(self, what: &str) -> ProgressBar {
        let bar = self.bar(None, "{spinner:.cyan} {msg}  {elapsed}", what);
        bar.enable_steady_tick(Duration::from_millis(100));
        bar
    }

    /// A bar of `total` things of one kind.
    pub(crate) fn things(self, what: &str, total: u64) -> ProgressBar {
        self.bar(Some(total), "{msg}  {bar:32.cyan/dim}  {pos} of {len}  {left}", what)
    }

    fn bar(self, total: Option<u64>, style: &str, what: &str) -> ProgressBar {
        let bar = match (self, total) {
            (Self::Quiet, _) => ProgressBar::hidden(),
            (Self::Shown, Some(total)) => ProgressBar::new(total),
            (Self::Shown, None) => ProgressBar::new_spinner(),
        };
        // The templates are constants; a wrong one would only cost the style.
        if let Ok(style) = ProgressStyle::with_template(style) {
            let left = |state: &ProgressState, out: &mut dyn fmt::Write| {
                // A bar that cannot be drawn is no error.
                let _ = out.write_str(&left(state.fraction(), state.elapsed()));
            };
            bar.set_style(style.progress_chars("━╸─").with_key("left", left));
        }
        bar.with_message(what.to_owned())
    }
}

/// How long the rest will take if it goes on as before; nothing while too little is done to tell, and less than a second
/// before the end, which may take longer.
fn left(done: f32, elapsed: Duration) -> String {
    let done = f64::from(done);
    match elapsed.as_secs_f64() * (1.0 - done) / done {
        seconds if done < 0.05 || seconds < 1.0 => String::new(),
        seconds => format!("about {seconds:.0} s left"),
    }
}

/// What a finished file must be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pinned {
    pub(super) sha256: &'static str,
    pub(super) bytes: u64,
}

/// A file that grows next to its final place and takes its name only when it is complete.
pub(super) struct Incoming {
    file: tempfile::NamedTempFile,
    hash: Sha256,
    bytes: u64,
    bar: ProgressBar,
    limit: Option<u64>,
}

impl Incoming {
    /// Starts a file in `folder`; more than `limit` bytes are refused.
    pub(super) fn new(folder: &Path, limit: Option<u64>, bar: ProgressBar) -> Result<Self, String> {
        let file = tempfile::Builder::new()
            .prefix(".incoming-")
            .permissions(Permissions::from_mode(0o644))
            .tempfile_in(folder)
            .map_err(|e| format!("cannot write into {}: {e}", folder.display()))?;
        Ok(Self { file, hash: Sha256::new(), bytes: 0, bar, limit })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.bytes += bytes.len() as u64;
        if let Some(limit) = self.limit.filter(|limit| self.bytes > *limit) {
            return Err(format!("it has more than the {limit} bytes expected"));
        }
        self.hash.update(bytes);
        self.bar.inc(bytes.len() as u64);
        self.file.write_all(bytes).map_err(|e| format!("cannot write: {e}"))
    }

    /// Copies everything that `from` has.
    pub(super) fn copy(&mut self, mut from: impl Read) -> Result<(), String> {
        let mut buffer = vec![0; 1 << 18];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => self.write(&buffer[..n])?,
                Err(e) => return Err(format!("cannot read: {e}")),
            }
        }
    }

    /// Checks the file against `pinned`, if given, and gives it its name.
    pub(super) fn finish(self, to: &Path, pinned: Option<Pinned>) -> Result<(), String> {
        let sha256 = hex(&self.hash.finalize());
        if let Some(pinned) = pinned
            && (self.bytes != pinned.bytes || sha256 != pinned.sha256)
        {
            return Err(format!(
                "wrong content: {} bytes with sha256 {sha256}, expected {} bytes with sha256 {}",
                self.bytes, pinned.bytes, pinned.sha256
            ));
        }
        let place = |e: std::io::Error| format!("cannot put it at {}: {e}", to.display());
        self.file.as_file().sync_all().map_err(place)?;
        self.file.persist(to).map_err(|e| place(e.error))?;
        self.bar.finish_and_clear();
        Ok(())
    }
}

/// Gets `url` over HTTP into `to`. `token` is sent as a bearer token to the first host only.
pub(super) async fn http(
    url: &str,
    token: Option<&str>,
    to: (&Path, &Path),
    pinned: Option<Pinned>,
    progress: Progress,
) -> Result<(), String> {
    let (folder, to) = to;
    let cause = |e: reqwest::Error| {
        let mut cause: &dyn std::error::Error = &e;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        cause.to_string()
    };
    let client = reqwest::Client::builder()
        .connect_timeout(PATIENCE)
        .read_timeout(PATIENCE)
        .user_agent(concat!("kvferry/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(cause)?;
    let mut request = client.get(url);
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    let mut answer = request.send().await.map_err(cause)?;
    if !answer.status().is_success() {
        return Err(format!("the server answered {}", answer.status()));
    }
    let bar = progress.bytes("downloading", answer.content_length());
    let mut incoming = Incoming::new(folder, pinned.map(|p| p.bytes), bar)?;
    let declared = answer.content_length();
    while let Some(bytes) = answer.chunk().await.map_err(cause)? {
        incoming.write(&bytes)?;
    }
    if let Some(declared) = declared.filter(|d| *d != incoming.bytes) {
        return Err(format!("{} bytes came, {declared} were announced", incoming.bytes));
    }
    incoming.finish(to, pinned)
}

/// Compares a file with what it must be; `Ok(false)` when it is not there.
pub(super) fn verify(path: &Path, pinned: Pinned) -> Result<bool, String> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e.to_string()),
    };
    let bytes = file.metadata().map_err(|e| e.to_string())?.len();
    if bytes != pinned.bytes {
        return Err(format!("{bytes} bytes instead of {}", pinned.bytes));
    }
    let found = sha256(&mut file).map_err(|e| e.to_string())?;
    if found == pinned.sha256 { Ok(true) } else { Err(format!("sha256 {found}")) }
}

/// The SHA-256 of everything that `from` has, hexadecimal.
pub(crate) fn sha256(mut from: impl Read) -> std::io::Result<String> {
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 18]);
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&buffer[..n]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: Pinned =
        Pinned { sha256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", bytes: 3 };

    #[test]
    fn what_is_left_is_told_once_it_can_be_known() {
        let ten = Duration::from_secs(10);
        assert_eq!(left(0.01, ten), "");
        assert_eq!(left(0.25, ten), "about 30 s left");
        assert_eq!(left(0.92, ten), "");
        assert_eq!(left(1.0, ten), "");
    }

    fn incoming(folder: &Path, bytes: &[u8]) -> Incoming {
        let mut incoming = Incoming::new(folder, None, ProgressBar::hidden()).unwrap();
        incoming.copy(bytes).unwrap();
        incoming
    }

    #[test]
    fn a_file_takes_its_name_only_when_it_is_right() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("model");
        let refused = incoming(folder.path(), b"abd").finish(&to, Some(ABC)).unwrap_err();
        assert!(refused.contains(ABC.sha256), "{refused}");
        assert_eq!(verify(&to, ABC), Ok(false));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");

        incoming(folder.path(), b"abc").finish(&to, Some(ABC)).unwrap();
        assert_eq!(verify(&to, ABC), Ok(true));
        std::fs::write(&to, "abd").unwrap();
        assert!(verify(&to, ABC).unwrap_err().contains("sha256"));
        std::fs::write(&to, "ab").unwrap();
        assert!(verify(&to, ABC).unwrap_err().contains("2 bytes instead of 3"));
    }

    #[test]
    fn more_bytes_than_expected_are_refused_as_they_come() {
        let folder = tempfile::tempdir().unwrap();
        let mut incoming = Incoming::new(folder.path(), Some(3), ProgressBar::hidden()).unwrap();
        incoming.write(b"abc").unwrap();
        assert!(incoming.write(b"d").unwrap_err().contains("more than the 3 bytes"));
    }
}
