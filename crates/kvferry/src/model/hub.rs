//! Files from the Hugging Face hub, by its public HTTP interface.

use std::{fmt, path::PathBuf, str::FromStr};

use kvferry_plan::Blame;

use super::{Progress, cache, fetch, make_folder};
use crate::failure::Failure;

/// `owner/repo/file`; the file may lie in folders of the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubFile {
    owner: String,
    repo: String,
    file: Vec<String>,
}

impl FromStr for HubFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The words become parts of a URL and of a local path.
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
        let word = |w: &str| !w.is_empty() && !w.starts_with('.') && w.chars().all(allowed);
        let mut words = text.split('/').map(str::to_owned);
        match (words.next(), words.next(), words.collect::<Vec<_>>()) {
            (Some(owner), Some(repo), file) if !file.is_empty() && text.split('/').all(word) => {
                Ok(Self { owner, repo, file })
            }
            _ => Err(format!(
                "hf:{text} is not hf:owner/repo/file; an example is \
                 hf:HuggingFaceTB/SmolLM2-135M-Instruct-GGUF/smollm2-135m-instruct-q8_0.gguf"
            )),
        }
    }
}

impl fmt::Display for HubFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.owner, self.repo, self.file.join("/"))
    }
}

/// Where the file lies once it was fetched.
pub(super) fn path(file: &HubFile) -> Result<PathBuf, Failure> {
    let folder = cache()?.join("hf").join(&file.owner).join(&file.repo);
    Ok(file.file.iter().fold(folder, |path, word| path.join(word)))
}

/// The file in the cache, or from the hub.
pub(super) async fn fetch(file: &HubFile, progress: Progress) -> Result<PathBuf, Failure> {
    let to = path(file)?;
    if to.exists() {
        return Ok(to);
    }
    let folder = to.parent().unwrap_or(&to);
    make_folder(folder)?;
    let host = std::env::var("HF_ENDPOINT").ok().filter(|host| !host.is_empty());
    let host = host.as_deref().unwrap_or("https://huggingface.co").trim_end_matches('/');
    let url = format!("{host}/{}/{}/resolve/main/{}", file.owner, file.repo, file.file.join("/"));
    let token = std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty());
    fetch::http(&url, token.as_deref(), (folder, &to), None, progress).await.map_err(|cause| {
        Failure::new(
            Blame::Environment,
            format!(
                "cannot fetch {url}: {cause}; check the name and the network, set HF_TOKEN for a private \
                 repository or HF_ENDPOINT for a mirror, or download the file and name its path"
            ),
        )
    })?;
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_cache() {
        let file: HubFile = "owner/repo/sub/model.gguf".parse().unwrap();
        assert_eq!(file.to_string(), "owner/repo/sub/model.gguf");
        for bad in ["", "owner/repo", "owner/repo/", "owner//file", "a/b/../c", "a/b/.c", "a/b/c?x", "/a/b/c"]
        {
            let error = bad.parse::<HubFile>().unwrap_err();
            assert!(error.contains("hf:owner/repo/file"), "{bad}: {error}");
        }
    }
}
